#include "engine/autograd_edges.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

#include "engine/unit.h"

namespace fsdpp::engine {
namespace {

using torch::autograd::variable_list;

struct BeforeAccumulate : torch::autograd::FunctionPreHook {
  BeforeAccumulate(std::shared_ptr<Unit> u, FlatBuffer& b, size_t i) : unit(std::move(u)), buffer(&b), index(i) {}
  variable_list operator()(const variable_list& grads) override {
    unit->before_accumulate(*buffer, index);
    return grads;
  }
  std::shared_ptr<Unit> unit;
  FlatBuffer* buffer;
  size_t index;
};

struct AfterAccumulate : torch::autograd::PostAccumulateGradHook {
  AfterAccumulate(std::shared_ptr<Unit> u, FlatBuffer& b, size_t i) : unit(std::move(u)), buffer(&b), index(i) {}
  ~AfterAccumulate() override {
    if (buffer->params()[index].handle().defined()) unit->note_lost_hook(buffer->params()[index].name);
  }
  void operator()(const at::Tensor&) override { unit->after_accumulate(*buffer, index); }
  std::shared_ptr<Unit> unit;
  FlatBuffer* buffer;
  size_t index;
};

// One for a node, with the units whose modules returned its result, in the order in which backward comes to them.
struct BeforeBackward : torch::autograd::FunctionPreHook {
  ~BeforeBackward() override {
    for (auto& exit : exits) exit.unit->forget_backward();
  }
  // A module that returned its input, and so what an earlier unit made, comes before that one.
  void add(const std::shared_ptr<Unit>& unit) {
    auto earlier = std::ranges::find_if(exits, [&](auto& exit) { return exit.unit->ended_before(*unit); });
    exits.insert(earlier, {unit, unit->runs_first_for_backward()});
    unit->expect_backward();
  }
  variable_list operator()(const variable_list& grads) override {
    for (auto& exit : exits) exit.unit->pre_backward(exit.last_module);
    return grads;
  }
  struct Exit {
    std::shared_ptr<Unit> unit;
    bool last_module;
  };
  std::vector<Exit> exits;
};

}  // namespace

void hook_parameter(const at::Tensor& handle, const std::shared_ptr<Unit>& unit, FlatBuffer& buffer, size_t index) {
  if (auto& own = torch::autograd::impl::post_acc_grad_hooks(handle))  // the user's: from now on after the reduction
    unit->add_param_hook(handle, [hook = std::shared_ptr(std::move(own))](const at::Tensor& parameter) { (*hook)(parameter); });
  torch::autograd::impl::set_post_acc_grad_hooks(handle, std::make_unique<AfterAccumulate>(unit, buffer, index));
}

std::shared_ptr<torch::autograd::Node> hooked_accumulator(const at::Tensor& handle, const std::shared_ptr<torch::autograd::Node>& hooked,
                                                          const std::shared_ptr<Unit>& unit, FlatBuffer& buffer, size_t index) {
  torch::autograd::impl::set_grad_accumulator(handle, hooked);
  if (hooked) return hooked;
  auto made = torch::autograd::impl::grad_accumulator(handle);
  made->add_pre_hook(std::make_unique<BeforeAccumulate>(unit, buffer, index));
  return made;
}

ParamPlace accumulated_parameter(const at::Tensor& leaf) {
  auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!accumulator) return {};
  for (auto& hook : accumulator->pre_hooks())
    if (auto* own = dynamic_cast<BeforeAccumulate*>(hook.get())) return {own->unit, own->buffer, own->index};
  return {};
}

void hook_output(const at::Tensor& output, const std::shared_ptr<Unit>& unit) {
  const auto& node = output.grad_fn();
  if (!node) return;
  for (auto& hook : node->pre_hooks())
    if (auto* own = dynamic_cast<BeforeBackward*>(hook.get())) return own->add(unit);
  auto made = std::make_unique<BeforeBackward>();
  made->add(unit);
  node->add_pre_hook(std::move(made));
}

}  // namespace fsdpp::engine
