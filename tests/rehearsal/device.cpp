// A CUDA device that computes nothing, for a build of torch without CUDA: tensors on it are fake ones.
//
// torch asks a device guard for the current device and stream, and the autograd engine orders streams
// through its events. This guard keeps the current stream of each thread and writes every record and
// wait to a log, which tests/rehearsal/streams.py reads.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

enum Kind : int64_t { kRecord = 0, kStreamWaits = 1, kHostWaits = 2, kHostWaitsForStream = 3 };

std::mutex log_mutex;
std::vector<int64_t> entries;  // (kind, event, stream) each
std::atomic<int64_t> last_stream{0}, last_event{0};
thread_local int64_t current_stream = 0;

void note(Kind kind, int64_t event, int64_t stream) {
  std::lock_guard<std::mutex> lock(log_mutex);
  entries.insert(entries.end(), {kind, event, stream});
}

Device the_device() { return Device(DeviceType::CUDA, 0); }
Stream stream_of(int64_t id) { return Stream(Stream::UNSAFE, the_device(), id); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return the_device(); }
  Device getDevice() const override { return the_device(); }
  Stream getStream(Device) const noexcept override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(++last_stream); }
  Stream exchangeStream(Stream stream) const noexcept override {
    const auto before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++last_event);
    note(kRecord, reinterpret_cast<int64_t>(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) note(kStreamWaits, reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) note(kHostWaits, reinterpret_cast<int64_t>(event), 0);
  }
  void synchronizeStream(const Stream& stream) const override { note(kHostWaitsForStream, 0, stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { note(kHostWaitsForStream, 0, -1); }
};

c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override { note(kHostWaitsForStream, 0, -1); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// Moves at most `room` numbers of the log to `out`, three an entry; returns how many.
extern "C" int64_t take_log(int64_t* out, int64_t room) {
  std::lock_guard<std::mutex> lock(log_mutex);
  const auto taken = std::min<int64_t>(room, static_cast<int64_t>(entries.size()));
  std::copy_n(entries.begin(), taken, out);
  entries.erase(entries.begin(), entries.begin() + taken);
  return taken;
}
