#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "fsdpp/profiler/speed_of_light.h"

namespace fsdpp::profiler {
namespace {

double element_size(const std::string& dtype) {
  static const std::map<std::string, double> kSizes{{"float", 4},
                                                    {"int", 4},
                                                    {"double", 8},
                                                    {"long int", 8},
                                                    {"long", 8},
                                                    {"c10::BFloat16", 2},
                                                    {"c10::Half", 2},
                                                    {"bool", 1},
                                                    {"unsigned char", 1},
                                                    {"signed char", 1},
                                                    {"c10::Float8_e4m3fn", 1},
                                                    {"c10::Float8_e5m2", 1},
                                                    {"short int", 2},
                                                    {"short", 2},
                                                    {"BFloat16", 2},
                                                    {"Half", 2},
                                                    {"int64", 8}};
  const auto it = kSizes.find(dtype);
  return it == kSizes.end() ? 0 : it->second;
}

using Shape = std::vector<double>;

std::vector<Shape> parse_shapes(const std::string& text) {
  std::vector<Shape> out;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_array()) return out;
  for (const auto& dims : json) {
    Shape shape;
    for (const auto& d : dims.is_array() ? dims : nlohmann::json::array()) {
      if (d.is_number()) shape.push_back(d.get<double>());
    }
    out.push_back(std::move(shape));
  }
  return out;
}

std::vector<std::string> parse_dtypes(std::string text) {
  std::replace(text.begin(), text.end(), '\'', '"');
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  std::vector<std::string> out;
  if (!json.is_array()) return out;
  for (const auto& d : json) out.push_back(d.is_string() ? d.get<std::string>() : "");
  return out;
}

double elements(const Shape& shape) {
  double n = 1;
  for (const double d : shape) n *= d;
  return n;
}

/// Indices of the two factors, or {-1, -1}.
std::pair<int, int> factors(const std::string& op) {
  if (op == "aten::mm" || op == "aten::bmm" || op == "aten::matmul" || op == "aten::_scaled_mm") return {0, 1};
  if (op == "aten::addmm" || op == "aten::baddbmm") return {1, 2};
  return {-1, -1};
}

double result_elements(const std::string& op, const std::vector<Shape>& shapes, double largest) {
  if (op.starts_with("fsdpp::")) return 0;  // results are among their arguments
  const auto [a, b] = factors(op);
  if (a < 0 || std::ssize(shapes) <= b) return largest;
  const Shape& left = shapes[static_cast<size_t>(a)];
  const Shape& right = shapes[static_cast<size_t>(b)];
  if (left.size() < 2 || right.size() < 2) return largest;
  return elements(left) / left.back() * right.back();
}

}  // namespace

double model_bytes(const CpuOp& op) {
  const std::vector<Shape> shapes = parse_shapes(op.shapes);
  const std::vector<std::string> dtypes = parse_dtypes(op.dtypes);
  double sum = 0, largest = 0, size = 0;
  for (size_t i = 0; i < shapes.size() && i < dtypes.size(); ++i) {
    const double each = element_size(dtypes[i]);
    if (each == 0 || shapes[i].empty()) continue;
    const double n = elements(shapes[i]);
    sum += n * each;
    if (n > largest) {
      largest = n;
      size = each;
    }
  }
  return sum > 0 ? sum + result_elements(op.name, shapes, largest) * size : 0;
}

Ceilings data_sheet_ceilings(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("H200")) return {989.4e12, 4.8e12, 0, "data sheet (H200 SXM: bf16 dense, HBM3e)"};
  if (has("H100") && has("PCIe")) return {756e12, 2.0e12, 0, "data sheet (H100 PCIe: bf16 dense, HBM2e)"};
  if (has("H100")) return {989.4e12, 3.35e12, 0, "data sheet (H100 SXM: bf16 dense, HBM3)"};
  return {0, 0, 0, "unknown device"};
}

std::optional<RooflinePoint> roofline_point(const KernelLight& kernel, const Ceilings& ceilings) {
  if (!kernel.flops || !kernel.bytes || !ceilings.known()) return std::nullopt;
  if (*kernel.flops <= 0 || *kernel.bytes <= 0 || kernel.total_ns <= 0) return std::nullopt;
  RooflinePoint p;
  p.intensity = *kernel.flops / *kernel.bytes;
  p.flops_per_s = *kernel.flops / (kernel.total_ns * 1e-9);
  p.roof_flops_per_s = std::min(ceilings.flops_per_s, p.intensity * ceilings.bytes_per_s);
  p.fraction = p.flops_per_s / p.roof_flops_per_s;
  p.memory_side = p.intensity < ceilings.ridge();
  return p;
}

Occupancy occupancy(const Kernel& kernel, const Device& device) {
  const int threads = kernel.block[0] * kernel.block[1] * kernel.block[2];
  const int warp = std::max(device.warp_size, 1);
  if (threads <= 0 || device.max_threads_per_sm <= 0) return {};
  const int warps = (threads + warp - 1) / warp;
  const int max_warps = device.max_threads_per_sm / warp;
  Occupancy out{32, 0, "blocks"};  // the limit of blocks of sm_80 to sm_100
  const auto bound = [&](int blocks, const char* what) {
    if (blocks < out.blocks) out = {blocks, 0, what};
  };
  bound(max_warps / warps, "threads");
  if (kernel.registers > 0 && device.registers_per_sm > 0) {
    const int per_warp = (kernel.registers * warp + 255) / 256 * 256;  // registers are given out in units of 256
    bound(device.registers_per_sm / per_warp / warps, "registers");
  }
  if (kernel.shared_memory > 0 && device.shared_per_sm > 0) {
    bound(static_cast<int>(device.shared_per_sm / (kernel.shared_memory + 1024)),
          "shared memory");  // 1 KiB is the system's
  }
  out.percent = 100.0 * out.blocks * warps / max_warps;
  return out;
}

}  // namespace fsdpp::profiler
