// Writes traces of hand-made schedules for tools that read Chrome's format: rank0.json, merged.json.gz, step.json.gz in
// a folder.
#include <iostream>
#include <string>
#include <vector>

#include "fsdpp/profiler/chrome_trace.h"
#include "report_example.h"

int main(int argc, char** argv) {
  using namespace fsdpp::profiler;
  if (argc != 2) return std::cerr << "usage: profiler_trace_example FOLDER\n", 2;
  const std::string folder = std::string(argv[1]) + "/";
  const std::vector<Trace> ranks{testing::Example(0).trace(), testing::Example(1, 40).trace()};
  export_chrome_trace(folder + "rank0.json", ranks[0]);
  export_chrome_trace(folder + "merged.json.gz", ranks);
  export_chrome_trace(folder + "step.json.gz", cut_to_step(ranks[0], ranks[0].steps.at(1).step));
}
