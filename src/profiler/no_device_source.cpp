#include "profiler/device_source.h"

namespace fsdpp::profiler {
namespace {

class NoDeviceSource : public DeviceSource {
 public:
  explicit NoDeviceSource(std::string problem) : problem_(std::move(problem)) {}
  void begin() override {}
  void synchronize() override {}
  DeviceRecords end() override {
    DeviceRecords none;
    if (!problem_.empty()) none.notes.push_back("the device was not traced: " + problem_);
    return none;
  }
  [[nodiscard]] std::string problem() const override { return problem_; }

 private:
  std::string problem_;
};

}  // namespace

std::unique_ptr<DeviceSource> make_no_device_source(std::string problem) {
  return std::make_unique<NoDeviceSource>(std::move(problem));
}

}  // namespace fsdpp::profiler
