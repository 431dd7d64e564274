#pragma once
/// Marks what the shared library shows. Everything else is hidden.
#define FSDPP_API __attribute__((visibility("default")))
