// Runs the cases of a file in fsdpp, ranks as threads: oracle_driver CASES.json OUT.json WEIGHTS.bin
// OUT.json: one object a case; WEIGHTS.bin: the final full weights of all cases, fp64, where OUT.json says.
#include <ATen/ops/equal.h>

#include <cstdio>
#include <exception>
#include <fstream>

#include "oracle/run_case.h"

namespace {

using fsdpp::test::oracle::RankResult;
using fsdpp::test::oracle::run_case;
using nlohmann::json;

json stats_of(const RankResult& result) {
  json all = json::array();
  for (auto& s : result.stats)
    all.push_back({{"forward_gathers", s.forward_gathers}, {"backward_gathers", s.backward_gathers}, {"gathers", s.gathers},
                   {"reduces", s.reduces}, {"all_reduces", s.all_reduces}});
  return all;
}

bool same_weights(const RankResult& a, const RankResult& b) {
  if (a.weights.size() != b.weights.size()) return false;
  for (size_t i = 0; i < a.weights.size(); ++i)
    if (!at::equal(a.weights[i].second, b.weights[i].second)) return false;
  return true;
}

// What of two runs is not bit-equal.
json differences(const RankResult& a, const RankResult& b) {
  json found = json::array();
  if (a.losses != b.losses || a.final_loss != b.final_loss) found.push_back("losses");
  if (a.norms != b.norms) found.push_back("norms");
  if (!same_weights(a, b)) found.push_back("weights");
  return found;
}

json write_weights(const RankResult& result, std::ofstream& weights) {
  json all = json::array();
  for (auto& [name, value] : result.weights) {
    auto flat = value.to(at::kDouble).contiguous();
    all.push_back({{"name", name}, {"shape", flat.sizes().vec()}, {"offset", static_cast<int64_t>(weights.tellp()) / 8}});
    weights.write(static_cast<const char*>(flat.const_data_ptr()), flat.numel() * 8);
  }
  return all;
}

json run(const json& c, std::ofstream& weights) {
  auto results = run_case(c, true);
  json out{{"id", c.at("id")}, {"final_losses", json::array()}, {"losses", json::array()}, {"norms", results[0].norms}};
  bool equal_ranks = true, equal_stats = true;
  for (auto& r : results) {
    out["losses"].push_back(r.losses);
    out["final_losses"].push_back(r.final_loss);
    equal_ranks = equal_ranks && same_weights(r, results[0]) && r.norms == results[0].norms;
    equal_stats = equal_stats && stats_of(r) == stats_of(results[0]) && r.wire == results[0].wire;
  }
  out["equal_ranks"] = equal_ranks;
  out["equal_stats"] = equal_stats;
  out["stats"] = stats_of(results[0]);
  out["wire"] = results[0].wire;
  if (results.size() == 1) out["unlike_unsharded"] = differences(results[0], run_case(c, false)[0]);
  out["unlike_second_run"] = differences(results[0], run_case(c, true)[0]);
  out["weights"] = write_weights(results[0], weights);
  return out;
}

int run_all(const char* cases_path, const char* out_path, const char* weights_path) {
  std::ifstream in(cases_path);
  std::ofstream weights(weights_path, std::ios::binary);
  json out = json::array();
  for (auto& c : json::parse(in)) try {
      out.push_back(run(c, weights));
    } catch (const std::exception& e) {
      out.push_back({{"id", c.at("id")}, {"error", e.what()}});
    }
  std::ofstream file(out_path);
  file << out;
  return weights.good() && file.good() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: oracle_driver CASES.json OUT.json WEIGHTS.bin\n");
    return 2;
  }
  try {
    return run_all(argv[1], argv[2], argv[3]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "oracle_driver: %s\n", e.what());
    return 1;
  }
}
