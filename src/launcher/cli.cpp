#include "launcher/cli.h"

#include <CLI/CLI.hpp>

namespace fsdpp::launcher {
namespace {

constexpr int kUsageExit = 2;
constexpr int kMaxPort = 65535;

constexpr const char* kAbout =
    "fsdpp-run [flags] [--] PROGRAM ARGS…\n"
    "Starts the ranks of a job on this node, prefixes their output by [rank], and ends all of them when one fails.\n"
    "Sets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, …), and OMP_NUM_THREADS to "
    "the\n"
    "cores of this node divided by its ranks unless it is set. With one rank, the program keeps the terminal.";

constexpr const char* kFooter =
    "Examples:\n"
    "  fsdpp-run --nproc-per-node 8 -- ./train --steps 100\n"
    "  fsdpp-run --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 -- ./train\n"
    "Exit status: 0, or the first failing rank's exit code (128 + signal number when a signal ended it).";

void add_flags(CLI::App& app, LaunchOptions& options) {
  app.add_option("--nproc-per-node,--nproc_per_node", options.nproc_per_node, "Ranks on this node")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--nnodes", options.nnodes, "Nodes; run fsdpp-run once on each")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--node-rank,--node_rank", options.node_rank, "Number of this node, from 0")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--master-addr,--master_addr", options.master_addr, "Host of rank 0 (one node: 127.0.0.1)");
  app.add_option("--master-port,--master_port", options.master_port, "Port of the rendezvous (one node: a free one)")
      ->check(CLI::Range(1, kMaxPort));
  app.add_option("--max-restarts,--max_restarts", options.max_restarts,
                 "Restart all ranks of this node after a failure, at most K times")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--ranks-per-gpu,--ranks_per_gpu", options.ranks_per_gpu,
                 "Test mode: G ranks share a GPU, with real NCCL over sockets (slow; for correctness only)")
      ->check(CLI::Range(1, 64));
}

// What CLI11 left over: [--] PROGRAM ARGS…, or a flag that it does not know.
std::string take_command(std::vector<std::string> rest, LaunchOptions& options) {
  const bool marked = !rest.empty() && rest.front() == "--";
  if (marked) rest.erase(rest.begin());
  if (rest.empty()) return "no program given. Try: fsdpp-run --nproc-per-node 2 -- PROGRAM ARGS…";
  if (!marked && rest.front().starts_with("-"))
    return "unknown flag '" + rest.front() + "'. Try: fsdpp-run --help, or put -- before the program";
  options.command = std::move(rest);
  return {};
}

std::string check_nodes(const LaunchOptions& options) {
  if (options.node_rank >= options.nnodes)
    return "--node-rank is " + std::to_string(options.node_rank) + "; expected 0 to " +
           std::to_string(options.nnodes - 1) + " because --nnodes is " + std::to_string(options.nnodes);
  if (options.nnodes > 1 && (options.master_addr.empty() || options.master_port == 0))
    return "--nnodes is " + std::to_string(options.nnodes) +
           ", so every node needs the same --master-addr and --master-port";
  return {};
}

CliResult usage_error(const std::string& message) { return {std::nullopt, "fsdpp-run: " + message + "\n", kUsageExit}; }

}  // namespace

CliResult parse_command_line(int argc, const char* const* argv) {
  LaunchOptions options;
  CLI::App app(kAbout, "fsdpp-run");
  app.footer(kFooter);
  app.prefix_command();
  add_flags(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {std::nullopt, app.help(), 0};
  } catch (const CLI::ParseError& error) {
    return usage_error(error.what());
  }
  if (auto problem = take_command(app.remaining(), options); !problem.empty()) return usage_error(problem);
  if (auto problem = check_nodes(options); !problem.empty()) return usage_error(problem);
  return {std::move(options), {}, 0};
}

}  // namespace fsdpp::launcher
