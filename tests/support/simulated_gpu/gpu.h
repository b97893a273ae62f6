// What the parts of the simulated GPU share: devices, memory, streams, and reports to Python.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>

namespace simulated_gpu {

constexpr c10::DeviceIndex MOST_DEVICES = 8;
constexpr int POISON = 0xFF;  // NaN in every floating-point type, -1 in integers

// Devices. Each thread has a current one, 0 at its start.
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void touch(c10::DeviceIndex device);  // what makes a process open a context there

// Makes a device the current one of this thread.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) : before_(exchange_device(device)) {}
  ~OnDevice() { exchange_device(before_); }

 private:
  c10::DeviceIndex before_;
};

// What random numbers are drawn from where no generator is given.
at::Generator& device_generator(c10::DeviceIndex device);

// Memory, of the host, poisoned when it is allocated and when it is freed.
c10::Allocator* memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* data);

// Streams. The work of a default stream is done at once, as early as it may be; that of another one
// is done when something waits for it, as late as it may be.
using Task = std::function<void()>;
c10::Stream current_stream(c10::DeviceIndex device);
bool is_late(c10::Stream stream);
void submit(c10::Stream stream, Task task);      // runs or queues it
void deliver(c10::Stream stream, Task task);     // runs once the host waits for the stream
void finish(c10::Stream stream);                 // the host waits for all of its work
void record_stream(const void* data, c10::Stream stream);

// A use of bytes [first, last) of an allocation by the next work of a stream. Reports uses of two
// streams that no event orders.
void use(const void* data, int64_t first, int64_t last, bool writes, c10::Stream stream,
         const std::string& by);

// Reports to Python. `kind`: "wait", the host waits for the device; "touch"; "race".
void report(const char* kind, const std::string& what);
void host_waits(const std::string& why);

}  // namespace simulated_gpu
