#pragma once
#include <c10/core/ScalarType.h>

#include <optional>

/// Policies of `fully_shard`; names and defaults as in PyTorch FSDP2.
namespace fsdpp {

/// dtypes of a unit. Only floating-point parameters and tensors are ever cast. Unset: as they are.
struct MixedPrecisionPolicy {
  /// dtype of the gathered parameters, so of forward and backward. Shards and optimizer keep the original dtype.
  std::optional<c10::ScalarType> param_dtype;
  /// dtype in which gradients are reduced (on the wire and in the sum). Unset: the dtype of the gathered parameters.
  std::optional<c10::ScalarType> reduce_dtype;
  /// dtype to which floating-point outputs of the unit's forward are cast.
  std::optional<c10::ScalarType> output_dtype;
  /// Cast floating-point inputs of the unit's forward to param_dtype.
  bool cast_forward_inputs = true;
};

/// Options of one `fully_shard` call.
struct FullyShardOptions {
  MixedPrecisionPolicy mp_policy;
  /// Free the gathered parameters after forward and gather them again for backward. Unset: true, but false for the root unit
  /// (the unit whose forward starts the iteration).
  std::optional<bool> reshard_after_forward;
};

}  // namespace fsdpp
