// fsdpp's operators beside LibTorch's, forward and backward, in turns within one process. One JSON object a row, then a
// table. Values of unit variance, weights of variance 1 / inputs. Parameters are plain tensors here: in a sharded unit
// their gradients go straight into its gradient buffer besides.
//
// Formulas. ms, libtorch_ms: a forward and backward, device time, median over turns. limit_ms: the longer of flops at
// 989 TFLOP/s (dense bf16) and bytes at 4.8 TB/s, both of an H200; flops: of the products, 2·m·n·k each; bytes: what
// goes in and its gradients, what comes out and its gradient, each moved once a pass (embedding: the rows that are
// read, the whole table's gradient). error, libtorch_error: largest over result and gradients of the norm of the
// difference to the same in fp32 (fp64 for fp32 operands), relative to the norm. The run fails if fsdpp's error is well
// above LibTorch's.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>

#include "fsdpp/ops/attention.h"
#include "fsdpp/ops/cross_entropy.h"
#include "fsdpp/ops/embedding.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/ops/mlp.h"
#include "fsdpp/ops/rms_norm.h"
#include "support/device.h"
#include "support/options.h"

namespace {

using bench::fixed;
using Tensors = std::vector<at::Tensor>;
using Operator = std::function<at::Tensor(const Tensors&)>;
constexpr double kPeakBytes = 4.8e12;

struct Settings {
  std::string device = "cpu";
  int64_t batch = 8, seq = 1024, dim = 2048, heads = 16, vocab = 32000;
  int turns = 5;
  double milliseconds = 200;
  bool spoil = false;
  [[nodiscard]] c10::Device where() const { return device == "cuda" ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU); }
  [[nodiscard]] int64_t tokens() const { return batch * seq; }
};

struct Case {
  std::string name;
  double flops = 0;  ///< forward and backward
  Tensors inputs;    ///< floating ones want gradients
  Operator ours, libtorch;
  double bytes = 0;  ///< forward and backward; 0: all operands, as above
};

std::optional<Settings> parse(int argc, char** argv) {
  Settings s;
  CLI::App app("fsdpp's operators beside LibTorch's.", "bench_operators");
  bench::add_device_flag(app, s.device);
  app.add_option("--batch", s.batch, "Samples")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seq", s.seq, "Tokens of a sample")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dim", s.dim, "Width")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--heads", s.heads, "Attention heads")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--vocab", s.vocab, "Rows of embedding and head")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--turns", s.turns, "Turns of each operator")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--milliseconds", s.milliseconds, "Of a turn")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--spoil", s.spoil, "Test aid: change one result before it is compared, which then has to fail");
  if (!bench::parse(app, argc, argv)) return std::nullopt;
  if (s.dim % s.heads != 0) throw fsdpp::ConfigError("bench_operators: --dim must be a multiple of --heads");
  return s;
}

/// Makes the operands of the cases.
class Maker {
 public:
  explicit Maker(const Settings& s)
      : s_(s),
        options_(at::TensorOptions(s.where()).dtype(s.device == "cuda" ? at::kBFloat16 : at::kFloat)) {}

  [[nodiscard]] at::Tensor x(int64_t width) const { return at::randn({s_.batch, s_.seq, width}, options_); }
  [[nodiscard]] at::Tensor weight(int64_t out, int64_t in) const {
    return at::randn({out, in}, options_).mul_(1 / std::sqrt(static_cast<double>(in)));
  }
  [[nodiscard]] at::Tensor vector(int64_t n) const { return at::randn({n}, options_); }
  /// Skewed ones: token k about as often as 1 / (k + 1), as in text.
  [[nodiscard]] at::Tensor ids(bool skewed) const {
    const auto u = at::rand({s_.batch, s_.seq}, options_.dtype(at::kFloat));
    const auto vocab = static_cast<double>(s_.vocab);
    const auto id = skewed ? at::pow(vocab + 1, u) - 1 : u * vocab;
    return id.to(at::kLong).clamp(0, s_.vocab - 1);
  }

 private:
  const Settings& s_;
  at::TensorOptions options_;
};

at::Tensor attention_by_libtorch(const at::Tensor& qkv, int64_t heads) {
  const auto batch = qkv.size(0), seq = qkv.size(1), dim = qkv.size(2) / 3;
  auto parts = qkv.chunk(3, -1);
  for (auto& t : parts) t = t.view({batch, seq, heads, dim / heads}).transpose(1, 2);
  return at::scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape({batch, seq, dim});
}

at::Tensor loss_by_libtorch(const Tensors& in) {
  const auto logits = at::linear(in[0], in[1]).view({-1, in[1].size(0)});
  return at::cross_entropy_loss(logits.scalar_type() == at::kBFloat16 ? logits.to(at::kFloat) : logits,
                                in[2].view({-1}));
}

std::vector<Case> make_cases(const Settings& s) {
  const Maker make(s);
  const auto d = s.dim, heads = s.heads;
  const auto product = [&](int64_t in, int64_t out) { return 6.0 * static_cast<double>(s.tokens() * in * out); };
  const auto embedding = [](const Tensors& in) { return at::embedding(in[1], in[0]); };
  const double element =
      s.device == "cuda" ? 2 : 4;  // the rows read, written, their gradients read; the table's gradient written
  const double of_embedding = element * static_cast<double>(d * (3 * s.tokens() + s.vocab));
  const auto our_embedding = [](const Tensors& in) { return fsdpp::ops::embedding(in[0], in[1]); };
  return {
      {"linear",
       product(d, d),
       {make.x(d), make.weight(d, d), make.vector(d)},
       [](const Tensors& in) { return fsdpp::ops::linear(in[0], in[1], in[2]); },
       [](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }},
      {"silu_mlp",
       product(d, 8 * d),
       {make.x(d), make.weight(4 * d, d), make.weight(d, 4 * d)},
       [](const Tensors& in) { return fsdpp::ops::silu_mlp(in[0], in[1], in[2]); },
       [](const Tensors& in) { return at::linear(at::silu(at::linear(in[0], in[1])), in[2]); }},
      {"attention",
       3.5 * 4.0 * static_cast<double>(s.tokens() * s.seq * d),
       {make.x(3 * d)},
       [heads](const Tensors& in) { return fsdpp::ops::attention(in[0], {.heads = heads}); },
       [heads](const Tensors& in) { return attention_by_libtorch(in[0], heads); }},
      {"add_rms_norm",
       0,
       {make.x(d), make.x(d), make.vector(d)},
       [](const Tensors& in) { return fsdpp::ops::add_rms_norm(in[0], in[1], in[2]).normed; },
       [d](const Tensors& in) { return at::rms_norm(in[0] + in[1], {d}, in[2]); }},
      {"linear_cross_entropy",
       product(d, s.vocab),
       {make.x(d), make.weight(s.vocab, d), make.ids(false)},
       [](const Tensors& in) { return fsdpp::ops::linear_cross_entropy(in[0], in[1], in[2]); },
       loss_by_libtorch},
      {"embedding, even ids", 0, {make.ids(false), make.weight(s.vocab, d)}, our_embedding, embedding, of_embedding},
      {"embedding, skewed ids", 0, {make.ids(true), make.weight(s.vocab, d)}, our_embedding, embedding, of_embedding},
  };
}

/// One operator with its operands: forward and backward, by a gradient of its own.
class Pass {
 public:
  Pass(Operator op, Tensors inputs) : op_(std::move(op)), inputs_(std::move(inputs)) {
    for (auto& t : inputs_)
      if (t.is_floating_point()) wanted_.push_back(t = t.detach().requires_grad_());
  }
  /// Result and gradients of the floating inputs.
  Tensors operator()(const at::Tensor& grad) const {
    const auto out = op_(inputs_);
    auto result = torch::autograd::grad({out}, wanted_, {grad});
    result.insert(result.begin(), out.detach());
    return result;
  }
  [[nodiscard]] at::Tensor forward() const {
    const at::NoGradGuard no_grad;
    return op_(inputs_);
  }
  [[nodiscard]] double bytes(const at::Tensor& out) const {
    double sum = 2.0 * static_cast<double>(out.nbytes());
    for (const auto& t : wanted_) sum += 3.0 * static_cast<double>(t.nbytes());
    return sum;
  }

 private:
  Operator op_;
  Tensors inputs_, wanted_;
};

double error(const Tensors& got, const Tensors& want) {
  double largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const auto w = want[i].to(at::kDouble);
    largest = std::max(largest, ((got[i].to(at::kDouble) - w).norm() / w.norm()).item<double>());
  }
  return largest;
}

Pass exact_pass(const Case& c) {
  Tensors wide;
  for (const auto& t : c.inputs)
    wide.push_back(t.is_floating_point() ? t.to(t.scalar_type() == at::kFloat ? at::kDouble : at::kFloat) : t);
  return {c.libtorch, wide};
}

struct Errors {
  double ours, libtorch;
};
Errors check(const Case& c, const Pass& ours, const Pass& libtorch, const at::Tensor& grad, bool spoil) {
  const auto exact = exact_pass(c);
  const auto want = exact(grad.to(exact.forward().scalar_type()));
  auto got = ours(grad);
  if (spoil) got.back() = got.back() * 1.05;
  const Errors errors{error(got, want), error(libtorch(grad), want)};
  if (!(errors.ours <= 1.25 * errors.libtorch + 1e-6))
    throw fsdpp::Error("bench_operators: " + c.name + ": relative error " + fixed(errors.ours, 7) +
                       " against LibTorch's " + fixed(errors.libtorch, 7));
  return errors;
}

void measure(const Settings& s, const Case& c, const bench::Report& report, bench::Table& table) {
  const Pass ours(c.ours, c.inputs), libtorch(c.libtorch, c.inputs);
  const auto out = libtorch.forward();
  const auto grad = out.dim() == 0 ? at::full_like(out, 1) : at::randn_like(out);
  const auto errors = check(c, ours, libtorch, grad, s.spoil);
  const auto time = [&](const Pass& pass) {
    return bench::milliseconds_of(out.device(), s.milliseconds, [&] { static_cast<void>(pass(grad)); });
  };
  std::vector<double> our_samples, libtorch_samples;
  for (int i = 0; i < s.turns; ++i) {
    our_samples.push_back(time(ours));
    libtorch_samples.push_back(time(libtorch));
  }
  const auto ms = bench::spread_of(our_samples), theirs = bench::spread_of(libtorch_samples);
  const double bytes = c.bytes > 0 ? c.bytes : ours.bytes(out),
               limit = 1e3 * std::max(c.flops / bench::kPeakFlops, bytes / kPeakBytes);
  bench::Row row{{"operator", c.name}, {"flops", c.flops}, {"bytes", bytes}, {"limit_ms", limit}};
  bench::put(row, "ms", ms);
  bench::put(row, "libtorch_ms", theirs);
  row["ratio"] = theirs.median / ms.median;
  row["error"] = errors.ours;
  row["libtorch_error"] = errors.libtorch;
  report.row(row);
  table.add({c.name, fixed(ms.median, 3), fixed(ms.min, 3) + ".." + fixed(ms.max, 3), fixed(theirs.median, 3),
             fixed(theirs.median / ms.median, 2), s.device == "cuda" ? fixed(limit / ms.median, 2) : "-",
             fixed(errors.ours, 6), fixed(errors.libtorch, 6)});
}

void run(const Settings& s) {
  const auto device = s.where();
  const bench::Report report(true, {{"bench", "operators"},
                                    {"batch", s.batch},
                                    {"seq", s.seq},
                                    {"dim", s.dim},
                                    {"heads", s.heads},
                                    {"vocab", s.vocab},
                                    {"device", s.device},
                                    {"machine", bench::machine(device)}});
  bench::Table table(
      {"operator", "ms", "min..max", "LibTorch ms", "LibTorch / ours", "limit / ours", "error", "LibTorch's"});
  for (const auto& c : make_cases(s)) measure(s, c, report, table);
  report.table(table);
}

}  // namespace

int main(int argc, char** argv) try {
  if (const auto settings = parse(argc, argv)) run(*settings);
} catch (const std::exception& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
