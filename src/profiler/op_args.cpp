#include "profiler/op_args.h"

#include <array>
#include <optional>

namespace fsdpp::profiler {
namespace {

void write_tensor(std::vector<int64_t>& out, const TensorArg& tensor) {
  out.push_back(tensor.dtype);
  out.push_back(static_cast<int64_t>(tensor.sizes.size()));
  out.insert(out.end(), tensor.sizes.begin(), tensor.sizes.end());
}

class Reader {
 public:
  explicit Reader(std::span<const int64_t> in) : in_(in) {}
  [[nodiscard]] bool more() const { return at_ < in_.size(); }

  std::optional<Arg> next() {
    Arg arg;
    arg.tag = static_cast<ArgTag>(word());
    switch (arg.tag) {
      case ArgTag::Tensor: arg.tensors.push_back(tensor()); break;
      case ArgTag::TensorList:
        for (int64_t n = word(); n > 0 && ok_; --n) arg.tensors.push_back(tensor());
        break;
      case ArgTag::IntList: arg.ints = list(); break;
      case ArgTag::Int: arg.ints.push_back(word()); break;
      default: break;
    }
    return ok_ ? std::optional(std::move(arg)) : std::nullopt;
  }

 private:
  int64_t word() {
    if (at_ < in_.size()) return in_[at_++];
    ok_ = false;
    return 0;
  }
  std::vector<int64_t> list() {
    const int64_t n = word();
    ok_ = ok_ && n >= 0 && static_cast<size_t>(n) <= in_.size() - at_;
    if (!ok_) return {};
    const auto part = in_.subspan(at_, static_cast<size_t>(n));
    at_ += part.size();
    return {part.begin(), part.end()};
  }
  TensorArg tensor() {
    const int64_t dtype = word();
    return {dtype, list()};
  }

  std::span<const int64_t> in_;
  size_t at_ = 0;
  bool ok_ = true;
};

std::string list_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

template <class Text>
std::string join_args(const std::vector<Arg>& args, Text text) {
  std::string all = "[";
  for (size_t i = 0; i < args.size(); ++i) all += (i ? ", " : "") + text(args[i]);
  return all + "]";
}

const char* dtype_name(int64_t dtype) {
  // As compilers name the C++ types of LibTorch's ScalarType, in its order: what readers of torch's traces know.
  static constexpr std::array kNames{"unsigned char", "signed char", "short int", "int", "long int", "c10::Half", "float", "double",
                                     "c10::complex<c10::Half>", "c10::complex<float>", "c10::complex<double>", "bool", "c10::qint8",
                                     "c10::quint8", "c10::qint32", "c10::BFloat16"};
  if (dtype < 0) return "";
  return static_cast<size_t>(dtype) < kNames.size() ? kNames[static_cast<size_t>(dtype)] : "other";
}

}  // namespace

void write_arg(std::vector<int64_t>& out, const Arg& arg) {
  out.push_back(static_cast<int64_t>(arg.tag));
  if (arg.tag == ArgTag::TensorList) out.push_back(static_cast<int64_t>(arg.tensors.size()));
  for (const TensorArg& tensor : arg.tensors) write_tensor(out, tensor);
  if (arg.tag == ArgTag::IntList) out.push_back(static_cast<int64_t>(arg.ints.size()));
  out.insert(out.end(), arg.ints.begin(), arg.ints.end());
}

std::vector<Arg> read_args(std::span<const int64_t> encoded) {
  std::vector<Arg> args;
  Reader reader(encoded);
  while (reader.more()) {
    auto arg = reader.next();
    if (!arg) break;
    args.push_back(std::move(*arg));
  }
  return args;
}

std::string shapes_text(const std::vector<Arg>& args) {
  return join_args(args, [](const Arg& arg) {
    if (arg.tag == ArgTag::Tensor) return list_text(arg.tensors[0].sizes);
    if (arg.tag != ArgTag::TensorList) return std::string("[]");
    std::string text = "[";
    for (size_t i = 0; i < arg.tensors.size(); ++i) text += (i ? ", " : "") + list_text(arg.tensors[i].sizes);
    return text + "]";
  });
}

std::string dtypes_text(const std::vector<Arg>& args) {
  return join_args(args, [](const Arg& arg) -> std::string {
    switch (arg.tag) {
      case ArgTag::Tensor: return std::string("'") + dtype_name(arg.tensors[0].dtype) + "'";
      case ArgTag::TensorList: return "'TensorList'";
      case ArgTag::IntList: return "'ScalarList'";
      case ArgTag::Int: return "'Scalar'";
      default: return "''";
    }
  });
}

}  // namespace fsdpp::profiler
