#pragma once
// What the benchmarks print: one JSON object a row as soon as it is known, and a table for people at the end.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/stats.h"

namespace bench {

using Row = nlohmann::ordered_json;

/// Columns of text, the first aligned to the left, the others to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { rows_.push_back(std::move(head)); }
  /// Throws std::invalid_argument for a row with another number of columns.
  void add(std::vector<std::string> row);
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// Prints on rank 0 only. JSON lines start with '{', lines of the table never do.
class Report {
 public:
  /// `common` is in every row.
  Report(bool enabled, Row common) : enabled_(enabled), common_(std::move(common)) {}
  void row(const Row& values) const;
  void table(const Table& table) const;
  void line(const std::string& text) const;

 private:
  bool enabled_;
  Row common_;
};

[[nodiscard]] std::string fixed(double value, int digits);
/// "1 KiB", "16 MiB", "1.5 GiB".
[[nodiscard]] std::string bytes_text(int64_t bytes);
/// row["NAME"], row["NAME_min"], row["NAME_max"].
void put(Row& row, const std::string& name, const Spread& spread);

}  // namespace bench
