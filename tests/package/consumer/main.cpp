// A model of two layers, sharded over all ranks and trained:  fsdpp-run --nproc-per-node 2 -- ./consumer
#include <fsdpp/fsdpp.h>
#include <torch/torch.h>

#include <iostream>

struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t in, int64_t out) : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(linear(x)); }

  torch::nn::Linear linear;
};
FSDPP_MODULE(Layer);  // instead of TORCH_MODULE: a call gathers the layer's parameters and frees them again

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return second(first(x)); }

  Layer first = register_module("first", Layer(8, 64));
  Layer second = register_module("second", Layer(64, 1));
};
FSDPP_MODULE(Net);

int main() {
  auto world = fsdpp::comm::World::init();  // who am I, and where are the others?
  auto mesh = fsdpp::comm::Mesh::shard(world);

  torch::manual_seed(0);  // the same weights and samples on every rank
  Net net;
  fsdpp::fully_shard(net->first, mesh);
  fsdpp::fully_shard(net->second, mesh);
  fsdpp::fully_shard(net, mesh);  // the root comes last
  fsdpp::optim::AdamW optimizer(*net, {.lr = 1e-2});

  auto x = torch::randn({64, 8});
  auto y = torch::sin(x.sum(1, /*keepdim=*/true));
  auto my_x = x.chunk(world->size())[world->rank()];
  auto my_y = y.chunk(world->size())[world->rank()];

  for (int step = 0; step <= 40; ++step) {
    auto loss = torch::mse_loss(net(my_x), my_y);
    loss.backward();  // reduces the gradients: each rank keeps its shard of their mean
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 0) {
      torch::NoGradGuard no_grad;
      std::cout << "step " << step << ", loss over all samples " << torch::mse_loss(net(x), y).item<float>()
                << std::endl;
    }
  }
}
