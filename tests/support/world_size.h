#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "fsdpp/comm/world.h"

namespace fsdpp::test {

/// A distributed test must run with as many ranks as CTest started: a launcher that lost some would make it pass by
/// doing less.
inline void expect_started_world_size(const comm::World& world) {
  const char* expected = std::getenv("FSDPP_TEST_WORLD_SIZE");
  ASSERT_NE(expected, nullptr) << "run this program through CTest, or set FSDPP_TEST_WORLD_SIZE";
  ASSERT_EQ(world.size(), std::stoi(expected));
}

}  // namespace fsdpp::test
