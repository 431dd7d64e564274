#include "engine/init_record.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "engine/use_guard.h"

namespace fsdpp::engine {
namespace {

using Kind = InitStep::Kind;

struct Record {
  InitSteps steps;
  size_t width;  ///< bytes of an element
};

void delete_record(void* record) { delete static_cast<Record*>(record); }

Record* record_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  return tensor.storage().data_ptr().cast_context<Record>(&delete_record);
}

// Falling strides, without dimensions of size 1, neighbours that follow each other joined.
std::vector<Region::Dim> normal_form(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<Region::Dim> dims;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) dims.push_back({sizes[d], strides[d]});
  std::stable_sort(dims.begin(), dims.end(), [](auto& x, auto& y) { return x.stride > y.stride; });
  std::vector<Region::Dim> joined;
  for (auto& dim : dims) {
    if (!joined.empty() && joined.back().stride == dim.stride * dim.size)
      joined.back() = {joined.back().size * dim.size, dim.stride};
    else
      joined.push_back(dim);
  }
  return joined;
}

bool nested(const std::vector<Region::Dim>& dims) {
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].stride < 1) return false;
    if (d + 1 < dims.size() && dims[d].stride < dims[d + 1].stride * dims[d + 1].size) return false;
  }
  return true;
}

std::optional<Region> make_region(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  Region region{offset, c10::multiply_integers(sizes), {}};
  if (region.numel == 0) return region;
  region.dims = normal_form(sizes, strides);
  if (!nested(region.dims)) return std::nullopt;
  if (region.dims.empty() || (region.dims.size() == 1 && region.dims[0].stride == 1)) region.dims.clear();
  return region;
}

bool covers(const Region& outer, const Region& inner) {
  return inner.numel == 0 || (outer.in_a_row() && outer.offset <= inner.offset && inner.end() <= outer.end());
}

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

void subtract(Ranges& ranges, const Region& region) {
  Ranges rest;
  for (auto [begin, end] : ranges) {
    if (begin < region.offset) rest.emplace_back(begin, std::min(end, region.offset));
    if (end > region.end()) rest.emplace_back(std::max(begin, region.end()), end);
  }
  ranges = std::move(rest);
}

bool meets(const Ranges& ranges, const Region& region) {
  if (region.numel == 0) return false;
  return std::any_of(ranges.begin(), ranges.end(), [&](auto& r) { return r.first < region.end() && region.offset < r.second; });
}

// The last step that `stop` accepts among those whose elements later steps have not all overwritten.
template <class Stop>
const InitStep* find_visible(const InitSnapshot& snapshot, Stop&& stop) {
  int64_t last = snapshot.offset;
  for (size_t d = 0; d < snapshot.sizes.size(); ++d) last += (snapshot.sizes[d] - 1) * snapshot.strides[d];
  if (snapshot.numel() == 0) return nullptr;
  Ranges open{{snapshot.offset, last + 1}};
  for (auto step = snapshot.steps.rbegin(); step != snapshot.steps.rend(); ++step) {
    if (!meets(open, step->region)) continue;
    if (stop(*step)) return &*step;
    if (step->overwrites() && step->region.in_a_row()) subtract(open, step->region);
  }
  return nullptr;
}

}  // namespace

int64_t Region::end() const noexcept {
  if (in_a_row()) return offset + numel;
  int64_t last = offset;
  for (auto& d : dims) last += (d.size - 1) * d.stride;
  return last + 1;
}

bool Region::contains(int64_t element) const noexcept {
  int64_t rest = element - offset;
  if (rest < 0 || numel == 0) return false;
  if (in_a_row()) return rest < numel;
  for (auto& d : dims) {
    int64_t at = rest / d.stride;
    if (at >= d.size) return false;
    rest -= at * d.stride;
  }
  return rest == 0;
}

std::optional<Region> region_of(const at::Tensor& tensor) { return make_region(tensor.storage_offset(), tensor.sizes(), tensor.strides()); }

int64_t InitSnapshot::numel() const noexcept { return c10::multiply_integers(sizes); }

bool InitSnapshot::is_contiguous() const noexcept {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != expected) return numel() == 0;
    expected *= sizes[d];
  }
  return true;
}

bool computes(c10::ScalarType dtype) noexcept {
  switch (dtype) {
    case c10::ScalarType::Float: case c10::ScalarType::Double: case c10::ScalarType::Half: case c10::ScalarType::BFloat16:
    case c10::ScalarType::Long: case c10::ScalarType::Int: case c10::ScalarType::Short: case c10::ScalarType::Char:
    case c10::ScalarType::Byte: case c10::ScalarType::Bool: return true;
    default: return false;
  }
}

InitSteps* recorded_steps(const at::Tensor& tensor) {
  auto* record = record_of(tensor);
  return record ? &record->steps : nullptr;
}

bool views_as_recorded(const at::Tensor& tensor) { return record_of(tensor)->width == tensor.dtype().itemsize(); }

void start_record(const at::Tensor& tensor, InitSteps steps) {
  auto owned = std::make_unique<Record>(std::move(steps), tensor.dtype().itemsize());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, owned.release(), &delete_record, c10::Device(c10::kMeta)));
  point_handle(tensor, make_guarded_view(tensor));
}

void add_step(InitSteps& steps, InitStep step) {
  if (step.region.numel == 0) return;
  if (step.overwrites()) std::erase_if(steps, [&](auto& earlier) { return covers(step.region, earlier.region); });
  steps.push_back(std::move(step));
}

InitSnapshot snapshot_of(const at::Tensor& tensor) {
  const auto& steps = *recorded_steps(tensor);
  InitSnapshot snapshot{steps, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
  if (!views_as_recorded(tensor)) {
    snapshot.steps.assign(1, {});
    auto& lost = snapshot.steps.front();
    lost.kind = Kind::Unknown, lost.op = "a view as another dtype", lost.region = kEverything, lost.dtype = snapshot.dtype;
  }
  return snapshot;
}

std::optional<InitSteps> rebased(const InitSnapshot& snapshot) {
  if (!snapshot.is_contiguous()) return std::nullopt;
  InitSteps result;
  const int64_t begin = snapshot.offset, end = begin + snapshot.numel();
  for (auto step : snapshot.steps) {
    auto& r = step.region;
    if (r.numel == 0 || r.end() <= begin || r.offset >= end) continue;
    if (r.in_a_row()) {
      const int64_t first = std::max(r.offset, begin);
      step.skip += first - r.offset;
      r.numel = std::min(r.end(), end) - first;
      r.offset = first;
    } else if (r.offset < begin || r.end() > end) {
      return std::nullopt;
    }
    r.offset -= begin;
    add_step(result, std::move(step));
  }
  return result;
}

std::optional<std::string> obstacle(const InitSnapshot& snapshot) {
  const bool only_replayed = snapshot.steps.size() == 1 && snapshot.is_contiguous();
  const auto* step = find_visible(snapshot, [&](auto& s) {
    return s.kind == Kind::Undefined || s.kind == Kind::Unknown || (!only_replayed && !computes(s.dtype));
  });
  return step ? std::optional(step->op) : std::nullopt;
}

bool is_deterministic(const InitSnapshot& snapshot) {
  return !obstacle(snapshot) && !find_visible(snapshot, [](auto& s) { return s.kind == Kind::Uniform || s.kind == Kind::Normal; });
}

}  // namespace fsdpp::engine
