#include "fsdpp/base/error.h"

namespace fsdpp {
// Key functions: one home for each vtable, so that catching across the library boundary works.
Error::~Error() = default;
ConfigError::~ConfigError() = default;
UsageError::~UsageError() = default;
CudaError::~CudaError() = default;
CommError::~CommError() = default;
CheckpointError::~CheckpointError() = default;
}  // namespace fsdpp
