#include <zlib.h>

#include <array>
#include <memory>

#include "base/enforce.h"
#include "fsdpp/profiler/chrome_trace.h"
#include "fsdpp/profiler/report.h"
#include "profiler/report_records.h"

namespace fsdpp::profiler {
namespace {

/// The whole file, unpacked if it is packed.
std::string read_all(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), &gzclose);
  FSDPP_ENFORCE(file != nullptr, Error, "read_traces: can't open {}", path);
  std::string out;
  std::array<char, 1 << 16> buffer{};
  int n = 0;
  while ((n = gzread(file.get(), buffer.data(), static_cast<unsigned>(buffer.size()))) > 0)
    out.append(buffer.data(), static_cast<size_t>(n));
  FSDPP_ENFORCE(n == 0, Error, "read_traces: {} is damaged: it can't be unpacked", path);
  return out;
}

}  // namespace

std::vector<Trace> read_traces(const std::string& path) {
  const std::string bytes = read_all(path);
  if (bytes.starts_with("fsdpp-trace")) return {from_bytes(bytes)};
  try {
    return traces_from_chrome(nlohmann::json::parse(bytes));
  } catch (const nlohmann::json::exception& e) {
    fail<Error>("read_traces: expected a trace in Chrome's format or of to_bytes(), got {}: {}", path, e.what());
  } catch (const Error& e) {
    fail<Error>("read_traces: {}: {}", path, e.what());
  }
}

}  // namespace fsdpp::profiler
