#pragma once
/// Everything: fully sharded data parallel training for LibTorch.
#include "fsdpp/api/fully_shard.h"
#include "fsdpp/api/module_holder.h"
#include "fsdpp/engine/policy.h"
#include "fsdpp/api/unit_handle.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/log.h"
#include "fsdpp/checkpoint/full_state.h"
#include "fsdpp/comm/mesh.h"
#include "fsdpp/comm/world.h"
#include "fsdpp/ops/linear.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip_grad_norm.h"
