#include "support/report.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <stdexcept>

namespace bench {
namespace {

// Letters, not bytes: a continuation byte of UTF-8 takes no column.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

void Table::add(std::vector<std::string> row) {
  if (row.size() != rows_.front().size())
    throw std::invalid_argument("Table::add: expected " + std::to_string(rows_.front().size()) + " columns, got " +
                                std::to_string(row.size()));
  rows_.push_back(std::move(row));
}

std::string Table::text() const {
  std::vector<size_t> widths(rows_.front().size());
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  std::string text;
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - width_of(row[i]), ' ');
      text += i == 0 ? row[i] + pad : "  " + pad + row[i];
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

void Report::row(const Row& values) const {
  if (!enabled_) return;
  Row all = common_;
  all.update(values);
  std::cout << all.dump() << std::endl;
}

void Report::table(const Table& table) const {
  if (enabled_) std::cout << table.text() << std::flush;
}

void Report::line(const std::string& text) const {
  if (enabled_) std::cout << text << std::endl;
}

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fixed(value, value == std::floor(value) ? 0 : 1) + " " + kUnits[unit];
}

void put(Row& row, const std::string& name, const Spread& spread) {
  row[name] = spread.median;
  row[name + "_min"] = spread.min;
  row[name + "_max"] = spread.max;
}

}  // namespace bench
