#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// An operator's inputs as numbers, written while it runs and read after the window: no tensor is kept alive.
namespace fsdpp::profiler {

enum class ArgTag : int64_t { Other, Tensor, TensorList, IntList, Int };

struct TensorArg {
  int64_t dtype = -1;  ///< number of LibTorch's ScalarType; -1: undefined
  std::vector<int64_t> sizes;
};

struct Arg {
  ArgTag tag = ArgTag::Other;
  std::vector<TensorArg> tensors;  ///< one for Tensor
  std::vector<int64_t> ints;       ///< one for Int

  static Arg tensor(std::vector<int64_t> sizes, int64_t dtype = 6) { return {ArgTag::Tensor, {{dtype, std::move(sizes)}}, {}}; }
  static Arg list(std::vector<int64_t> values) { return {ArgTag::IntList, {}, std::move(values)}; }
  static Arg number(int64_t value) { return {ArgTag::Int, {}, {value}}; }
};

/// Stream form: tag, then Tensor: dtype, dims, sizes… · TensorList: count, tensors · IntList: count, values · Int: value.
void write_arg(std::vector<int64_t>& out, const Arg& arg);
/// What was written; a damaged tail is left out.
[[nodiscard]] std::vector<Arg> read_args(std::span<const int64_t> encoded);

/// "[[2, 3], [[4], [5]], []]": sizes of tensors; [] for anything else.
[[nodiscard]] std::string shapes_text(const std::vector<Arg>& args);
/// "['float', '', 'Scalar']"
[[nodiscard]] std::string dtypes_text(const std::vector<Arg>& args);

/// Floating-point operations (a multiply-add is two) of matrix products, convolutions and attention, forward and backward;
/// 0 for other operators and for inputs of an unexpected form. Attention is counted without a mask.
[[nodiscard]] double flops_of(std::string_view op, const std::vector<Arg>& args);

}  // namespace fsdpp::profiler
