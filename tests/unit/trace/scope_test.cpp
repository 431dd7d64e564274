#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "fsdpp/trace/scope.h"

namespace fsdpp::trace {
namespace {

class Recorder final : public Listener {
 public:
  using Listener::begin;
  using Listener::end;
  void begin(const Event& e) noexcept override { seen.push_back("+" + std::string(name_of(e.kind)) + " " + std::string(e.name)); }
  void end(const Event& e) noexcept override { seen.push_back("-" + std::string(name_of(e.kind)) + " " + std::string(e.name)); }
  void begin(const CollectiveEvent& e) noexcept override { seen.push_back("+" + std::string(e.op) + " " + std::to_string(e.bytes)); }
  std::vector<std::string> seen;
};

TEST(Scope, WithoutAListenerNobodyIsTold) {
  Recorder recorder;
  { Scope scope(Kind::User, "nobody"); }
  set_listener(&recorder);
  set_listener(nullptr);
  { Scope scope(Kind::User, "nobody"); }
  EXPECT_TRUE(recorder.seen.empty());
}

TEST(Scope, NestedScopesEndInReverse) {
  Recorder recorder;
  set_listener(&recorder);
  {
    Scope outer(Kind::PreForward, "layers.0");
    Scope inner(Kind::Unshard, "layers.0", 64);
    CollectiveScope wire({"mesh.gather", "all_gather", "layers.0", 3, 64, false});
  }
  set_listener(nullptr);
  EXPECT_EQ(recorder.seen, (std::vector<std::string>{"+PreForward layers.0", "+Unshard layers.0", "+all_gather 64", "-Unshard layers.0",
                                                     "-PreForward layers.0"}));
}

TEST(Scope, AThreadsOwnListenerHearsThatThreadOnly) {
  Recorder process, own;
  set_listener(&process);
  std::thread([&] {
    set_listener(&own, /*for_this_thread=*/true);
    Scope scope(Kind::Loader, "batch");
  }).join();
  { Scope scope(Kind::Optimizer, "adamw"); }
  set_listener(nullptr);
  EXPECT_EQ(own.seen, (std::vector<std::string>{"+Loader batch", "-Loader batch"}));
  EXPECT_EQ(process.seen, (std::vector<std::string>{"+Optimizer adamw", "-Optimizer adamw"}));
}

TEST(Scope, TheListenerThatHeardTheBeginHearsTheEnd) {
  Recorder first;
  set_listener(&first);
  {
    Scope scope(Kind::User, "kept");
    set_listener(nullptr);
  }
  EXPECT_EQ(first.seen.size(), 2u);
}

}  // namespace
}  // namespace fsdpp::trace
