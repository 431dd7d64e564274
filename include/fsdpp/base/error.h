#pragma once
#include <stdexcept>
#include <string>

#include "fsdpp/base/export.h"

/// Every error of fsdpp. Form of a message: `[rank 3/8, iteration 12] who: expected … got …. Try: …`.
/// The rank prefix is present once `World::init` has run in the process (or thread, for in-process ranks).
namespace fsdpp {

/// Base of all errors thrown by fsdpp.
class FSDPP_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

/// A wrong flag, environment variable, option or combination of them.
class FSDPP_API ConfigError : public Error {
 public:
  using Error::Error;
  ~ConfigError() override;
};

/// A call that the state of a module, unit or parameter does not allow.
class FSDPP_API UsageError : public Error {
 public:
  using Error::Error;
  ~UsageError() override;
};

/// A CUDA runtime call failed.
class FSDPP_API CudaError : public Error {
 public:
  using Error::Error;
  ~CudaError() override;
};

/// Why a communication failed.
enum class CommErrc { Timeout, RemoteDied, Mismatch, Backend, Aborted, InitTimeout, Injected };

/// A collective, a rendezvous or a communicator failed. After the first one a communicator stays failed.
class FSDPP_API CommError : public Error {
 public:
  CommError(CommErrc code, const std::string& what) : Error(what), code_(code) {}
  ~CommError() override;
  [[nodiscard]] CommErrc code() const noexcept { return code_; }

 private:
  CommErrc code_;
};

/// A file that can't be read, written or matched to the model.
class FSDPP_API CheckpointError : public Error {
 public:
  using Error::Error;
  ~CheckpointError() override;
};

}  // namespace fsdpp
