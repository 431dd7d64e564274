#include "engine/comm_context.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "base/enforce.h"
#include "engine/unit.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/log.h"

namespace fsdpp::engine {
namespace {

constexpr size_t kLongestOrder = 1 << 16;  // forwards that never see a backward must not grow the order for ever

std::mutex contexts_mutex;
std::unordered_map<const comm::Mesh*, std::weak_ptr<CommContext>>& contexts() {
  static auto* instance = new std::unordered_map<const comm::Mesh*, std::weak_ptr<CommContext>>;
  return *instance;
}

bool registering(const comm::Mesh& mesh) { return mesh.options().symmetric_buffers && mesh.shard_size() > 1; }

bool same(const std::weak_ptr<Unit>& a, const std::shared_ptr<Unit>& b) { return !a.owner_before(b) && !b.owner_before(a); }

}  // namespace

std::shared_ptr<CommContext> CommContext::of(const std::shared_ptr<comm::Mesh>& mesh) {
  std::lock_guard lock(contexts_mutex);
  auto& entry = contexts()[mesh.get()];
  if (auto existing = entry.lock(); existing && existing->mesh_ == mesh) return existing;
  auto made = std::make_shared<CommContext>(mesh);
  entry = made;
  return made;
}

CommContext::CommContext(std::shared_ptr<comm::Mesh> mesh)
    : mesh_(std::move(mesh)),
      gathered_pool_(mesh_->device(), registering(*mesh_) ? &mesh_->gather_comm() : nullptr, "gathered buffer"),
      gradient_pool_(mesh_->device(), registering(*mesh_) ? &mesh_->reduce_comm() : nullptr, "gradient buffer"),
      staging_pool_(mesh_->device()), step_check_(*mesh_) {
  set_reduce_buffers(1);
  if (on_wire()) gather_stream_ = make_stream();
  if (reduces_on_wire()) reduce_stream_ = make_stream();
  if (mesh_->replicate_size() > 1) all_reduce_stream_ = make_stream();
}

cuda::Stream CommContext::make_stream() const { return cuda::Stream(mesh_->device(), cuda::Stream::Priority::High); }

void CommContext::copies_to_host() {
  if (std::exchange(copies_to_host_, true)) return;
  if (!on_wire()) gather_stream_ = make_stream();
  if (!reduces_on_wire()) reduce_stream_ = make_stream();
}

void CommContext::note_host_access(cuda::StreamView stream) {
  for (auto& [known, event] : host_accesses_)
    if (known == stream) return event.record(stream);
  host_accesses_.emplace_back(stream, cuda::Event()).second.record(stream);
}

void CommContext::settle_host_access() {
  for (auto& [stream, event] : host_accesses_) event.synchronize();
}

void CommContext::set_reduce_buffers(int count) {
  FSDPP_ENFORCE(!slots_reserved_ || count == reduce_buffers_, UsageError,
                "set_reduce_scatter_max_input_buffers: symmetric buffers were made in the first forward, for {}; got {}. Try: call it "
                "before the first forward",
                reduce_buffers_, count);
  reduce_buffers_ = count;
  gradient_pool_.set_slots(count);
}

void CommContext::check_each_step(const std::shared_ptr<Unit>& unit) {
  std::erase_if(checked_units_, [](auto& known) { return known.first.expired(); });
  for (auto& known : checked_units_)
    if (same(known.first, unit)) return;
  checked_units_.emplace_back(unit, unit->param_count());
}

void CommContext::enter_forward(Unit& unit) {
  if (forward_depth_ == 0 && torch::autograd::get_current_graph_task_id() < 0) {
    unit.initialise_root();
    begin_iteration();
  }
  ++forward_depth_;
}

void CommContext::leave_forward() {
  if (--forward_depth_ > 0 || torch::autograd::get_current_graph_task_id() >= 0) return;
  for (auto& weak : std::exchange(open_groups_, {}))
    if (auto unit = weak.lock()) unit->end_open_group();
  drop_unused_gathers();
  settle_host_access();
}

void CommContext::reset_iteration() noexcept {
  try {
    drain_reduces(0);
  } catch (...) {  // the reductions of the failed backward: their gradients are dropped
    reduces_.clear();
  }
  step_check_.forget();
  try {
    for (auto& [task, units] : std::exchange(running_backwards_, {}))
      for (auto& unit : units) unit->abandon_backward();
    drop_unused_gathers();
    reshard_later_.clear();
    open_groups_.clear();
    wait_reduces();
    settle_host_access();
  } catch (const CommError&) {  // said already by what made the step fail
  } catch (const std::exception& e) {
    log::error(std::string("units could not be reset after a failed backward: ") + e.what());
  }
}

// One of a captured step says nothing to a step outside of it, nor the other way round.
void CommContext::set_post_optim_event(cuda::Event event) {
  if (!compute_stream().is_capturing()) post_optim_event_ = std::move(event);
}

void CommContext::begin_iteration() {
  log::set_iteration(iterations_++);
  if (!forward_order_.empty()) last_forward_order_ = std::exchange(forward_order_, {});
  if (post_forward_order_.size() > kLongestOrder) post_forward_order_.clear();
  if (!gathers_apart()) return;
  const auto event = std::exchange(post_optim_event_, std::nullopt);
  if (event && !compute_stream().is_capturing())
    gather_stream_.view().wait(*event);
  else
    gather_stream_.view().wait(compute_stream());
}

void CommContext::record_forward_use(const std::shared_ptr<Unit>& unit) {
  size_t i = forward_order_.size();
  forward_order_.push_back(unit);
  if (auto& explicit_list = unit->forward_prefetch(); !explicit_list.empty()) {
    for (auto& weak : explicit_list)
      if (auto next = weak.lock()) gather_ahead(next, true);
    return;
  }
  if (i + 1 < last_forward_order_.size() && same(last_forward_order_[i], unit))
    if (auto next = last_forward_order_[i + 1].lock()) gather_ahead(next, true);
}

int64_t CommContext::record_post_forward(const std::shared_ptr<Unit>& unit) {
  post_forward_order_.push_back(unit);
  return static_cast<int64_t>(post_forward_order_.size()) - 1;
}

void CommContext::gather_ahead(const std::shared_ptr<Unit>& unit, bool forward) {
  if (!gathers_apart() || unit->state() != UnitState::Sharded) return;
  if (!forward && !unit->unshards_in_backward()) return;
  unit->gather(forward ? GatherReason::Forward : GatherReason::Backward);
  gathered_ahead_.push_back(unit);
}

void CommContext::drop_unused_gathers() {
  for (auto& weak : std::exchange(gathered_ahead_, {}))
    if (auto unit = weak.lock(); unit && unit->state() == UnitState::Gathering) unit->reshard();
}

// Ends a backward: by its final callback, or, when autograd drops that uncalled because the backward failed, by destruction.
struct CommContext::BackwardEnd {
  BackwardEnd(std::shared_ptr<CommContext> c, int t) : context(std::move(c)), task(t) {}
  ~BackwardEnd() {
    if (!done) context->reset_iteration();
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  void run() {
    context->finish_backward(task);
    done = true;
  }
  std::shared_ptr<CommContext> context;
  int task;
  bool done = false;
};

void CommContext::touch(const std::shared_ptr<Unit>& unit) {
  int task = torch::autograd::get_current_graph_task_id();
  auto [it, first] = running_backwards_.try_emplace(task);
  it->second.push_back(unit);
  if (first)
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<BackwardEnd>(shared_from_this(), task)] { end->run(); });
}

void CommContext::prefetch_backward(const Unit& unit) {
  if (auto& explicit_list = unit.backward_prefetch(); !explicit_list.empty()) {
    for (auto& weak : explicit_list)
      if (auto next = weak.lock(); next && !next->in_backward()) gather_ahead(next, false);
    return;
  }
  auto known = static_cast<int64_t>(post_forward_order_.size());  // an earlier backward may have cleared the order
  for (int64_t i = std::min(unit.post_forward_index(), known) - 1; i >= 0; --i) {
    auto previous = post_forward_order_[static_cast<size_t>(i)].lock();
    if (!previous || previous.get() == &unit) continue;
    if (!previous->in_backward()) gather_ahead(previous, false);
    return;
  }
}

void CommContext::push_reduce(comm::Ticket ticket, std::function<void()> finish) {
  if (mesh_->device().is_cuda()) return finish();  // everything is in the reduce stream's order
  reduces_.push_back({std::move(ticket), std::move(finish)});
}

void CommContext::drain_reduces(size_t in_flight) {
  while (reduces_.size() > in_flight) {
    auto oldest = std::move(reduces_.front());
    reduces_.erase(reduces_.begin());
    oldest.ticket.wait_host();
    oldest.finish();
  }
}

void CommContext::wait_reduces() {
  drain_reduces(0);
  compute_stream().wait(reduce_stream());
  compute_stream().wait(all_reduce_stream());
  gradient_pool_.settle();
}

void CommContext::reshard_finished(const Unit& reached) {
  std::erase_if(reshard_later_, [&](auto& weak) {
    auto unit = weak.lock();
    if (unit && (unit.get() == &reached || !reached.ended_before(*unit))) return false;
    if (unit) unit->reshard();
    return true;
  });
}

void CommContext::note_late_reducer(const std::shared_ptr<Unit>& unit) {
  for (auto& known : late_reducers_)
    if (same(known, unit)) return;
  late_reducers_.push_back(unit);
}

void CommContext::join_late(std::vector<std::shared_ptr<Unit>>& units) {
  for (auto& weak : late_reducers_) {
    auto unit = weak.lock();
    if (!unit || !unit->owes_reduction()) continue;
    unit->reduce_late();
    unit->end_backward();
    if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
}

void CommContext::finish_backward(int task) {
  auto units = running_backwards_.at(task);
  for (auto& unit : units) unit->finish_backward();
  if (running_backwards_.size() > 1) {  // a backward inside a backward: the outer one completes the reductions
    running_backwards_.erase(task);
    auto& outer = running_backwards_.rbegin()->second;
    outer.insert(outer.end(), units.begin(), units.end());
    return;
  }
  complete(units);
  running_backwards_.erase(task);
}

// Tells and asks the other ranks for which parameters they had gradients. Only a rank that lacks one waits for the answer.
void CommContext::agree_on_step() {
  if (!reduces_on_wire() || !step_check_.reduced()) return;
  if (compute_stream().is_capturing()) {  // the host does not come along when it is replayed
    FSDPP_ENFORCE(!adopted_, UsageError,
                  "a step is captured in a graph, but in the one before other ranks had gradients for parameters of this rank that it lacked: "
                  "expected the same parameters on all ranks. Try: set_reduce_scatter_unused_params(true), or no StepGraph.");
    return step_check_.forget();
  }
  adopted_ = false;
  std::vector<char> flags;
  bool lacks = false;
  for (auto& [weak, count] : checked_units_) {
    size_t end = flags.size() + count;
    if (auto unit = weak.lock()) lacks = unit->append_gradient_flags(flags) || lacks;
    flags.resize(end);
  }
  step_check_.exchange(flags, reduce_stream(), all_reduce_stream());
  if (!lacks) return;
  const char* agreed = step_check_.agreed_flags();
  for (auto& [weak, count] : checked_units_) {
    if (auto unit = weak.lock()) adopted_ = unit->adopt_gradient_flags(agreed) || adopted_;
    agreed += count;
  }
  compute_stream().wait(all_reduce_stream());  // on which hooks may have written parameters
}

// Units kept for parameters read late, and whatever else is gathered though no backward will come for it.
void CommContext::reshard_rest() {
  for (auto& weak : std::exchange(reshard_later_, {}))
    if (auto unit = weak.lock()) unit->reshard();
  for (auto& known : checked_units_)
    if (auto unit = known.first.lock(); unit && !unit->awaits_backward()) unit->end_backward();
}

void CommContext::complete(std::vector<std::shared_ptr<Unit>>& units) {
  join_late(units);
  reshard_rest();
  drop_unused_gathers();
  if (is_last_backward_) post_forward_order_.clear();
  wait_reduces();
  agree_on_step();
  settle_host_access();
  for (auto& unit : units) unit->restore_grads();
}

}  // namespace fsdpp::engine
