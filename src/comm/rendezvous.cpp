#include "comm/rendezvous.h"

#include <charconv>
#include <thread>

#include "base/enforce.h"
#include "comm/store.h"

namespace fsdpp::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr char kField = '\x1f';
constexpr auto kLinger = std::chrono::seconds(3);

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

std::string arrival_key(int64_t number) { return fmt::format("rendezvous/arrival/{}", number); }
constexpr const char* kArrivals = "rendezvous/arrivals";
constexpr const char* kVerdict = "rendezvous/verdict";
constexpr const char* kRead = "rendezvous/read";
constexpr const char* kOk = "ok";
constexpr const char* kConfig = "config";
constexpr const char* kTimeout = "timeout";

[[noreturn]] void throw_verdict(const std::string& kind, const std::string& text) {
  if (kind == kTimeout) fail_comm(CommErrc::InitTimeout, "{}", text);
  fail<ConfigError>("{}", text);
}

class Meeting {
 public:
  Meeting(Store& store, const Arrival& self, VariableNames names, std::chrono::milliseconds timeout)
      : store_(store), self_(self), names_(names), timeout_(timeout), deadline_(Clock::now() + timeout), roll_(names) {}

  void run(bool linger) {
    number_ = store_.add(kArrivals, 1);
    store_.set(arrival_key(number_), self_.encode());
    const std::string verdict = number_ == 1 ? lead() : follow();
    if (verdict == kOk) return;
    store_.add(kRead, 1);
    const size_t cut = verdict.find(kField);
    // Who has not come in time will not come in a moment; after another verdict, late ranks are still on their way.
    if (linger) wait_for_readers(verdict.substr(0, cut) == kTimeout ? 0 : self_.world_size);
    throw_verdict(verdict.substr(0, cut), verdict.substr(cut + 1));
  }

 private:
  // The first to arrive checks everybody, and decides.
  std::string lead() {
    Backoff backoff;
    int64_t read = 0;
    while (true) {
      for (const int64_t arrived = store_.add(kArrivals, 0); read < arrived; ++read) {
        const auto text = store_.try_get(arrival_key(read + 1));
        if (!text) break;  // counted, and about to say who it is
        if (auto wrong = roll_.add(Arrival::decode(*text)); !wrong.empty())
          return decide(fmt::format("{}{}{}", kConfig, kField, wrong));
      }
      if (roll_.complete()) return decide(kOk);
      if (Clock::now() >= deadline_) {
        read_all_after(read);
        return decide(timeout_text());
      }
      backoff.pause();
    }
  }

  std::string decide(const std::string& verdict) {
    store_.set(kVerdict, verdict);
    return verdict;
  }

  std::string follow() {
    Backoff backoff;
    while (true) {
      if (auto verdict = store_.try_get(kVerdict))
        return number_ > self_.world_size && *verdict == kOk ? late_text() : *verdict;
      // The leader's time runs out before ours; a moment more for its verdict to arrive.
      if (Clock::now() >= deadline_ + std::chrono::milliseconds(500)) {
        read_all_after(0);
        return timeout_text();
      }
      backoff.pause();
    }
  }

  // A process may have died between being counted and saying who it is; others came after it.
  void read_all_after(int64_t read) {
    for (int64_t i = read + 1, n = store_.add(kArrivals, 0); i <= n; ++i)
      if (auto text = store_.try_get(arrival_key(i))) (void)roll_.add(Arrival::decode(*text));
  }

  std::string timeout_text() const {
    return fmt::format("{}{}rendezvous: {}", kTimeout, kField, roll_.complete() ? silent_text() : missing_text());
  }

  std::string missing_text() const {
    return fmt::format(
        "expected {}={} processes within {} s, but {} arrived, and these ranks did not arrive: {}. Try: look at their "
        "logs; check that every process has its own {} from 0 to {}; {}",
        names_.world_size, self_.world_size, seconds(timeout_), roll_.count(), roll_.missing(self_.world_size),
        names_.rank, self_.world_size - 1, kMoreTime);
  }

  // All are there, but the one that decides does not.
  std::string silent_text() const {
    const auto first = Arrival::decode(store_.try_get(arrival_key(1)).value_or(""));
    return fmt::format(
        "all {}={} processes arrived within {} s, but {}={} ({}), which came first and checks the others, has not "
        "answered. Try: look at its log",
        names_.world_size, self_.world_size, seconds(timeout_), names_.rank, first.rank, first.who);
  }

  std::string late_text() const {
    return fmt::format(
        "{}{}rendezvous: this process ({}) has {}={}, but all {}={} ranks of the job had arrived before it. Try: give "
        "every "
        "process its own {}, and two jobs on one host different ports",
        kConfig, kField, self_.who, names_.rank, self_.rank, names_.world_size, self_.world_size, names_.rank);
  }

  void wait_for_readers(int64_t expected) {
    const auto end = Clock::now() + kLinger;
    Backoff backoff;
    while (Clock::now() < end && store_.add(kRead, 0) < std::max(expected, store_.add(kArrivals, 0))) backoff.pause();
  }

  Store& store_;
  const Arrival& self_;
  VariableNames names_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Roll roll_;
  int64_t number_ = 0;
};

int parse_int(std::string_view text) {
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

VariableNames variable_names(const std::string& launcher) {
  if (launcher == "openmpi") return {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"};
  if (launcher == "mpich") return {"PMI_RANK", "PMI_SIZE"};
  if (launcher == "slurm") return {"SLURM_PROCID", "SLURM_NTASKS"};
  return {"RANK", "WORLD_SIZE"};
}

std::string Arrival::encode() const {
  return fmt::format("{}{}{}{}{}{}{}", rank, kField, world_size, kField, who, kField, problem);
}

Arrival Arrival::decode(const std::string& text) {
  Arrival result;
  const size_t a = text.find(kField), b = text.find(kField, a + 1), c = text.find(kField, b + 1);
  if (c == std::string::npos) {
    result.problem = fmt::format("rendezvous: expected a record of this version of fsdpp in the store, got '{}'", text);
    return result;
  }
  result.rank = parse_int(std::string_view(text).substr(0, a));
  result.world_size = parse_int(std::string_view(text).substr(a + 1, b - a - 1));
  result.who = text.substr(b + 1, c - b - 1);
  result.problem = text.substr(c + 1);
  return result;
}

std::string Roll::add(const Arrival& arrival) {
  if (!arrival.problem.empty()) return arrival.problem;
  if (!seen_.empty()) {
    const Arrival& first = seen_.begin()->second;
    if (first.world_size != arrival.world_size)
      return fmt::format("rendezvous: expected one {}, got {} from {}={} ({}) and {} from {}={} ({})",
                         names_.world_size, first.world_size, names_.rank, first.rank, first.who, arrival.world_size,
                         names_.rank, arrival.rank, arrival.who);
  }
  if (arrival.rank < 0 || arrival.rank >= arrival.world_size)
    return fmt::format("rendezvous: expected {} from 0 to {} because {}={}, got {}={} ({})", names_.rank,
                       arrival.world_size - 1, names_.world_size, arrival.world_size, names_.rank, arrival.rank,
                       arrival.who);
  const auto [it, fresh] = seen_.emplace(arrival.rank, arrival);
  if (fresh) return {};
  return fmt::format(
      "rendezvous: {}={} was given to two processes: {}, and {}. Try: give every process its own {} from 0 to {}",
      names_.rank, arrival.rank, it->second.who, arrival.who, names_.rank, arrival.world_size - 1);
}

std::string Roll::missing(int world_size) const {
  std::string text;
  int shown = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    if (seen_.contains(rank)) continue;
    if (++shown > 10) return text + ", …";
    text += fmt::format("{}{}", shown > 1 ? ", " : "", rank);
  }
  return text;
}

void rendezvous(Store& store, const Arrival& self, VariableNames names, std::chrono::milliseconds timeout,
                bool linger) {
  Meeting(store, self, names, timeout).run(linger);
}

}  // namespace fsdpp::comm
