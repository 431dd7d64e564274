#pragma once
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace fsdpp::dcp {

/// The format's dtype names that LibTorch has a type for.
inline constexpr std::array<std::pair<std::string_view, c10::ScalarType>, 15> kDtypes{{
    {"F64", c10::ScalarType::Double},
    {"F32", c10::ScalarType::Float},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U64", c10::ScalarType::UInt64},
    {"U32", c10::ScalarType::UInt32},
    {"U16", c10::ScalarType::UInt16},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
}};

inline std::optional<c10::ScalarType> dtype_from_name(std::string_view name) {
  for (const auto& [known, dtype] : kDtypes)
    if (known == name) return dtype;
  return std::nullopt;
}

/// All names, for messages.
inline std::string dtype_names() {
  std::string all;
  for (const auto& [name, dtype] : kDtypes) all += (all.empty() ? "" : ", ") + std::string(name);
  return all;
}

}  // namespace fsdpp::dcp
