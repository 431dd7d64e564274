#pragma once
#include <string>

#include "options.h"

namespace bench {

/// Sizes by name, in place of those in `options`: "seed" (735 M parameters, 8 × 1024 tokens), "half" (dim 1024), "launch" (so
/// small that launches bound it: 24 layers of 256, 1 × 64 tokens), "small" (large enough for its memory to be that of its matrices),
/// "tiny" (for smoke tests). Throws fsdpp::ConfigError for another name.
void use_shape(minillm::Options& options, const std::string& name);

}  // namespace bench
