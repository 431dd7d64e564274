#include "fsdpp/engine/recomputation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <optional>

#include "base/enforce.h"
#include "engine/autocast_state.h"
#include "engine/random_states.h"

namespace fsdpp::engine {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;
using torch::autograd::variable_list;

constexpr int kNoTask = -2;  // autograd has -1 for "outside backward"

/// Ends a recomputation at the last tensor that is needed. No std::exception, so that handlers of errors let it pass.
struct StopRecomputation {};

/// What stands for a saved tensor in the graph.
struct Slot {
  at::Tensor value;      ///< undefined until a recomputation fills it, and once it was used
  uint32_t version = 0;  ///< of the value when it was saved
};

struct Traits {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  c10::Device device;
  explicit Traits(const at::Tensor& t) : sizes(t.sizes().vec()), dtype(t.scalar_type()), device(t.device()) {}
  bool operator==(const Traits&) const = default;
  [[nodiscard]] std::string text() const { return fmt::format("{} [{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "), device.str()); }
};

/// One call of a checkpointed function: how to run it again, and which of its tensors the graph still wants.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, Recomputation::Function again)
      : options_(options), again_(std::move(again)) {
    for (auto& t : inputs) inputs_.emplace_back(t, /*is_output=*/false);
    if (options.preserve_rng_state) random_states_ = RandomStates::of_defaults(inputs);
  }
  void end_first_run() noexcept { first_run_ended_ = true; }
  [[nodiscard]] std::shared_ptr<Slot> note(const at::Tensor& tensor);
  /// The next tensor that the second run saves. Throws StopRecomputation after the last.
  void refill(const at::Tensor& value);
  [[nodiscard]] at::Tensor take(Slot& slot);

 private:
  void run_again();
  [[nodiscard]] std::vector<at::Tensor> unpack_inputs() const;

  CheckpointOptions options_;
  Recomputation::Function again_;
  std::vector<SavedVariable> inputs_;
  RandomStates random_states_;
  AutocastState autocast_ = AutocastState::now();
  std::vector<std::weak_ptr<Slot>> slots_;  ///< in the order of saving; expired: no longer wanted
  std::vector<Traits> traits_;
  std::recursive_mutex mutex_;  ///< a backward may ask from several device threads
  bool first_run_ended_ = false;
  int filled_for_ = kNoTask;  ///< the backward whose needs the slots were filled for
  size_t refilled_ = 0;
};

/// A run of a checkpointed function on this thread. Runs nest; the innermost receives what autograd saves, but not what is
/// saved by a backward that started inside it.
struct Run {
  Run(Frame& f, bool a) : frame(f), again(a), task(torch::autograd::get_current_graph_task_id()), outer(current) { current = this; }
  ~Run() { current = outer; }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  Frame& frame;
  bool again;
  int task;
  Run* outer;
  static thread_local Run* current;
};
thread_local Run* Run::current = nullptr;

/// Drops the tensor in the first run.
struct Dropped : SavedVariableHooks {
  explicit Dropped(std::shared_ptr<Frame> f) : frame(std::move(f)) {}
  void call_pack_hook(const at::Tensor& tensor) override { slot = frame->note(tensor); }
  at::Tensor call_unpack_hook() override { return frame->take(*slot); }
  std::shared_ptr<Frame> frame;
  std::shared_ptr<Slot> slot;
};

/// Keeps the tensor in the second run: its graph is used by a backward inside the function only.
struct Refilled : SavedVariableHooks {
  explicit Refilled(Frame& f) : frame(f) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    value = tensor.detach();  // also where it needs none: a frozen parameter's handle shows something else once its unit is hidden
    frame.refill(value);
  }
  at::Tensor call_unpack_hook() override { return value; }
  Frame& frame;
  at::Tensor value;
};

/// Only the hooks are its own. LibTorch starts threads for devices once a process, for one engine (engine.h: "a single instance of
/// this struct"), so every backward is LibTorch's own engine's; whatever else is called on this one uses state of the thread only.
struct HookingEngine final : Engine {
  ~HookingEngine() override { stop(); }
  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto* run = Run::current;
    if (!run || run->task != torch::autograd::get_current_graph_task_id()) return nullptr;
    if (run->again) return std::make_unique<Refilled>(run->frame);
    return std::make_unique<Dropped>(run->frame.shared_from_this());
  }
  static Engine& get() {
    static HookingEngine instance;
    return instance;
  }
};

void install_engine() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& engine = Engine::get_default_engine();
  if (&engine == &HookingEngine::get()) return;
  FSDPP_ENFORCE(&engine == &Engine::get_base_engine(), ConfigError,
                "checkpoint: expected LibTorch's own autograd engine, got another one (a Python interpreter is part of this process?). "
                "Try: torch.utils.checkpoint from Python, or a process without it.");
  FSDPP_ENFORCE(torch::autograd::get_current_graph_task_id() < 0, UsageError,
                "checkpoint: expected the first call of the process outside backward, got it inside. Try: call it once in a forward.");
  engine.initialize_device_threads_pool();  // so that they are its own for sure
  torch::autograd::set_default_engine_stub(&HookingEngine::get);
}

std::shared_ptr<Slot> Frame::note(const at::Tensor& tensor) {
  auto slot = std::make_shared<Slot>();
  slots_.push_back(slot);
  traits_.emplace_back(tensor);
  return slot;
}

void Frame::refill(const at::Tensor& value) {
  size_t i = refilled_++;
  if (i >= slots_.size()) {
    if (options_.early_stop) throw StopRecomputation{};  // the function kept the first one from leaving it
    if (!first_run_ended_) return;                       // a backward inside the function: the rest was not saved yet
    fail<UsageError>("checkpoint: the function saved more tensors for backward when it ran again than the {} of its first run; the next is "
                     "{}. Expected the same computation both times. Try: don't branch on state that the function changes.",
                     slots_.size(), Traits(value).text());
  }
  if (Traits now(value); options_.determinism_check && !(now == traits_[i]))
    fail<UsageError>("checkpoint: tensor {} of {} that the function saves for backward was {} in the first run and is {} when it runs "
                     "again. Expected the same computation both times. Try: don't branch on state that the function changes; keep "
                     "preserve_rng_state if it draws random numbers.",
                     i, slots_.size(), traits_[i].text(), now.text());
  if (auto slot = slots_[i].lock()) {
    slot->value = value;
    slot->version = value._version();
  }
  if (options_.early_stop && refilled_ == slots_.size()) throw StopRecomputation{};
}

at::Tensor Frame::take(Slot& slot) {
  std::lock_guard lock(mutex_);
  int task = torch::autograd::get_current_graph_task_id();
  if (!slot.value.defined() || task != filled_for_) {
    run_again();
    filled_for_ = task;
  }
  FSDPP_ENFORCE(slot.value.defined(), UsageError, "checkpoint: running the function again did not compute a tensor that backward needs");
  auto value = std::exchange(slot.value, at::Tensor());
  FSDPP_ENFORCE(value._version() == slot.version, UsageError,
                "checkpoint: a tensor {} that the function saves for backward is changed in place later in it. Try: an operator that is "
                "not in place.", Traits(value).text());
  return value;
}

// Tensors inside a graph are cut from it: a hook set on one by the second run must not reach the first run's graph. Leaves
// (parameters) stay what they are.
std::vector<at::Tensor> Frame::unpack_inputs() const {
  std::vector<at::Tensor> tensors;
  for (auto& saved : inputs_) {
    auto t = saved.unpack();
    tensors.push_back(t.defined() && !t.is_leaf() ? t.detach().requires_grad_() : t);
  }
  return tensors;
}

void Frame::run_again() {
  auto inputs = unpack_inputs();
  std::optional<RandomStatesGuard> random;
  if (options_.preserve_rng_state) random.emplace(random_states_);
  AutocastGuard autocast(autocast_);
  at::AutoGradMode with_grad(true);
  Run run(*this, /*again=*/true);
  refilled_ = 0;
  try {
    again_(inputs);
  } catch (const StopRecomputation&) {
    return;
  }
  FSDPP_ENFORCE(!first_run_ended_ || refilled_ >= slots_.size(), UsageError,
                "checkpoint: the function saved {} tensors for backward when it ran again, {} in its first run; the first that is missing "
                "is {}. Expected the same computation both times. Try: don't branch on state that the function changes.",
                refilled_, slots_.size(), traits_[refilled_].text());
}

}  // namespace

struct Recomputation::Scope {
  explicit Scope(std::shared_ptr<Frame> f) : frame(std::move(f)), run(*frame, /*again=*/false) {}
  ~Scope() { frame->end_first_run(); }
  std::shared_ptr<Frame> frame;
  Run run;
};

Recomputation::Recomputation(const CheckpointOptions& options, const std::vector<at::Tensor>& inputs, Function again) {
  install_engine();
  scope_ = std::make_unique<Scope>(std::make_shared<Frame>(options, inputs, std::move(again)));
}

Recomputation::~Recomputation() = default;

bool Recomputation::running() noexcept {
  for (auto* run = Run::current; run; run = run->outer)
    if (run->again) return true;
  return false;
}

at::Tensor Recomputation::take(at::Tensor& tensor) { return tensor.defined() ? std::exchange(tensor, at::empty({0})) : tensor; }

}  // namespace fsdpp::engine
