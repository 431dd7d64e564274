#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "fsdpp/api/deferred_init.h"
#include "support/tiny_models.h"

namespace fsdpp::test {

/// What `make` builds while initialisation is deferred.
template <class Make>
auto deferred(Make&& make) {
  const DeferredInit guard;
  return make();
}

inline std::map<std::string, at::Tensor> state_of(torch::nn::Module& module) {
  std::map<std::string, at::Tensor> state;
  const auto known = sharded_parameters(module);
  auto sharded = [&](const at::Tensor& t) {
    return std::any_of(known.begin(), known.end(), [&](auto& p) { return p.handle.is_same(t); });
  };
  for (auto& p : module.named_parameters()) state[p.key()] = sharded(p.value()) ? full_tensor(p.value()) : p.value().detach().clone();
  for (auto& b : module.named_buffers()) state[b.key()] = b.value().clone();
  return state;
}

inline void expect_same(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want, const std::string& where) {
  ASSERT_EQ(got.size(), want.size()) << where;
  for (auto& [name, tensor] : want) {
    ASSERT_TRUE(got.contains(name)) << where << name;
    EXPECT_EQ(got.at(name).scalar_type(), tensor.scalar_type()) << where << name;
    EXPECT_TRUE(at::equal(got.at(name), tensor)) << where << name << "\n" << got.at(name) << "\n" << tensor;
  }
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "no exception of the expected type";
  return "";
}

// One tensor made by a function, as a parameter or (other dtypes) a buffer.
struct Holder : torch::nn::Module {
  explicit Holder(const std::function<at::Tensor()>& make) {
    auto t = make();
    value = at::isFloatingType(t.scalar_type()) ? register_parameter("value", t, false) : register_buffer("value", t);
  }
  at::Tensor value;
};

using MakeTensor = std::function<at::Tensor()>;

inline at::Tensor filled(at::Tensor t, const std::function<void(at::Tensor&)>& fill) {
  at::NoGradGuard no_grad;
  fill(t);
  return t;
}

inline TinyNet late_net() {
  return deferred([] { return TinyNet(23, 7, 3); });
}

}  // namespace fsdpp::test
