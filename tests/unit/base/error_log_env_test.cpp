#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <string>
#include <thread>

#include "base/enforce.h"
#include "base/env.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/log.h"

namespace fsdpp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Runs on a thread of its own, so that the rank of one test does not show in the next.
void on_thread(const std::function<void()>& body) { std::thread(body).join(); }

TEST(Error, ThrownByFailThenMessageIsFormattedAndTypeKept) {
  EXPECT_THROW(fail<UsageError>("x"), UsageError);
  EXPECT_EQ(message_of([] { fail<ConfigError>("expected {}, got '{}'", 3, "four"); }), "expected 3, got 'four'");
}

TEST(Error, CommErrorThenCodeIsKept) {
  try {
    fail_comm(CommErrc::RemoteDied, "rank {} is gone", 2);
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), CommErrc::RemoteDied);
    EXPECT_STREQ(error.what(), "rank 2 is gone");
    return;
  }
  FAIL() << "nothing thrown";
}

TEST(Error, RankOfThreadSetThenPrefixInMessagesOfThatThreadOnly) {
  on_thread([] {
    log::set_rank(3, 8, /*for_this_thread=*/true);
    EXPECT_EQ(message_of([] { fail<Error>("no"); }), "[rank 3/8] no");
  });
  EXPECT_EQ(message_of([] { fail<Error>("no"); }), "no");
}

TEST(Enforce, TrueThenArgumentsAreNotEvaluated) {
  int evaluated = 0;
  FSDPP_ENFORCE(true, Error, "{}", ++evaluated);
  EXPECT_EQ(evaluated, 0);
  EXPECT_THROW(FSDPP_ENFORCE(false, CheckpointError, "{}", ++evaluated), CheckpointError);
  EXPECT_EQ(evaluated, 1);
}

TEST(Env, UnsetOrEmptyThenNothing) {
  ::unsetenv("FSDPP_TEST_VARIABLE");
  EXPECT_FALSE(env::get("FSDPP_TEST_VARIABLE"));
  Variable empty("FSDPP_TEST_VARIABLE", "");
  EXPECT_FALSE(env::get("FSDPP_TEST_VARIABLE"));
  EXPECT_FALSE(env::get_int("FSDPP_TEST_VARIABLE", 0, 9));
  EXPECT_TRUE(env::get_flag("FSDPP_TEST_VARIABLE", true));
}

TEST(Env, NumberInRangeThenRead) {
  Variable set("FSDPP_TEST_VARIABLE", "-12");
  EXPECT_EQ(env::get_int("FSDPP_TEST_VARIABLE", -12, 5), -12);
}

TEST(Env, BadNumberThenErrorNamesVariableValueAndRange) {
  for (const char* text : {"abc", "5x", "6", "-1", "1.0", " 1", "99999999999999999999"}) {
    Variable set("FSDPP_TEST_VARIABLE", text);
    EXPECT_THAT(message_of([] { (void)env::get_int("FSDPP_TEST_VARIABLE", 0, 5); }),
                AllOf(HasSubstr("FSDPP_TEST_VARIABLE"), HasSubstr("'" + std::string(text) + "'"), HasSubstr("0 to 5")));
  }
}

TEST(Env, FlagThenSpellingsAndErrorForOthers) {
  for (const char* yes : {"1", "true", "True", "yes", "on"}) {
    Variable set("FSDPP_TEST_VARIABLE", yes);
    EXPECT_TRUE(env::get_flag("FSDPP_TEST_VARIABLE", false)) << yes;
  }
  for (const char* no : {"0", "false", "False", "no", "off"}) {
    Variable set("FSDPP_TEST_VARIABLE", no);
    EXPECT_FALSE(env::get_flag("FSDPP_TEST_VARIABLE", true)) << no;
  }
  Variable set("FSDPP_TEST_VARIABLE", "maybe");
  EXPECT_THAT(message_of([] { (void)env::get_flag("FSDPP_TEST_VARIABLE", true); }), HasSubstr("'maybe'"));
}

TEST(Env, DefaultThenKeepsWhatIsSet) {
  Variable set("FSDPP_TEST_VARIABLE", "mine");
  env::set_default("FSDPP_TEST_VARIABLE", "other");
  EXPECT_EQ(env::get("FSDPP_TEST_VARIABLE"), "mine");
  ::unsetenv("FSDPP_TEST_VARIABLE");
  env::set_default("FSDPP_TEST_VARIABLE", "other");
  EXPECT_EQ(env::get("FSDPP_TEST_VARIABLE"), "other");
}

// The level is read once, so the log tests use the default (warn).
TEST(Log, DefaultLevelThenWarningsShowWithRankAndInfoDoesNot) {
  testing::internal::CaptureStderr();
  on_thread([] {
    log::set_rank(1, 2, /*for_this_thread=*/true);
    log::warn("look {} here");
    log::info("quiet");
    log::debug("quiet");
  });
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, AllOf(HasSubstr("[fsdpp "), HasSubstr("warning] [rank 1/2] look {} here")));
  EXPECT_THAT(text, testing::Not(HasSubstr("quiet")));
}

}  // namespace
}  // namespace fsdpp
