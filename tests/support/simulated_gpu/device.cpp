// Devices, memory and streams of the simulated GPU, and what torch asks its CUDA library for.
#include "gpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace simulated_gpu {
namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

const auto DEVICES = static_cast<c10::DeviceIndex>(
    std::min<int>(from_environment("SIMULATED_GPUS", 1), MOST_DEVICES));
const bool DELAYS = from_environment("SIMULATED_GPU_DELAYS", 1) != 0;

// How much of each stream's work is known to be done before something.
struct Queue;
using Clock = std::map<Queue*, uint64_t>;

void merge(Clock& clock, const Clock& other) {
  for (auto [queue, place] : other) {
    auto& known = clock[queue];
    known = std::max(known, place);
  }
}

// One use of an allocation by a stream.
struct Use {
  Queue* queue;
  uint64_t place;
  int64_t first, last;  // bytes
  bool writes;
  std::string by;
};

// A piece of a stream's work that is not done yet.
struct Queued {
  uint64_t place;
  Task task;
};

// A stream.
struct Queue {
  c10::StreamId id;
  c10::DeviceIndex device;
  std::deque<Queued> waiting;
  uint64_t given = 0;      // pieces of work so far
  bool is_running = false;  // one of them, on any thread
  uint64_t running = 0;     // its place
  Clock knows;             // the work of other streams that the next piece comes behind
  std::vector<Use> freed;  // uses by other streams of memory that this stream gets again

  bool is_done(uint64_t place) const {
    return (waiting.empty() || waiting.front().place > place) && !(is_running && running <= place);
  }
};

// A place in the work of a stream.
struct Mark {
  Queue* queue = nullptr;
  uint64_t place = 0;
  Clock knows;
  std::chrono::steady_clock::time_point time;
};

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex device;
  Queue* queue;  // whose work gets its memory when it is freed
  std::set<Queue*> recorded;
  std::vector<Use> uses;
};

struct Memory {
  int64_t now = 0, peak = 0, limit = int64_t{80} << 30;  // bytes
};

// Everything below is guarded by `state`, which is never held while a task or Python runs.
std::mutex state;
std::condition_variable changed;
std::vector<std::unique_ptr<Queue>> queues;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue*> queue_at;
Clock host_knows;
std::unordered_map<const void*, Block> blocks;
std::map<const void*, size_t> pinned;
std::vector<void*> limbo;  // freed memory that queued work may still write to
Memory memories[MOST_DEVICES];
int64_t queued_tasks = 0;  // in all queues

std::atomic<int> epoch{0};  // of what touch() has reported
std::atomic<bool> watches_waits{false};
void (*report_to)(const char*, const char*) = nullptr;
void (*run_python)(int64_t) = nullptr;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local c10::StreamId stream_of_thread[MOST_DEVICES] = {};

Queue* queue_of(c10::Stream stream) {
  auto& found = queue_at[{stream.device_index(), stream.id()}];
  if (!found) {
    queues.push_back(std::make_unique<Queue>());
    found = queues.back().get();
    found->id = stream.id();
    found->device = stream.device_index();
  }
  return found;
}

std::string name_of(const Queue* queue) {
  std::string device = "cuda:" + std::to_string(queue->device);
  return queue->id ? "stream " + std::to_string(queue->id) + " of " + device
                   : "the default stream of " + device;
}

bool knows(Queue* queue, const Use& use) {
  auto at = [&](const Clock& clock) {
    auto found = clock.find(use.queue);
    return found == clock.end() ? 0 : found->second;
  };
  return use.queue == queue || at(queue->knows) >= use.place || at(host_knows) >= use.place;
}

Mark mark_of(Queue* queue) {
  Mark mark{queue, queue->given, queue->knows, std::chrono::steady_clock::now()};
  mark.knows[queue] = queue->given;
  return mark;
}

// Releases the interpreter's lock, where this thread has it: another thread may need it to run a
// piece of work that this one waits for. The functions are those of the program that loaded us.
class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    static auto* holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto* save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds && holds()) thread_ = save();
  }
  ~WithoutPythonLock() {
    static auto* restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (thread_) restore(thread_);
  }

 private:
  void* thread_ = nullptr;
};

// Runs a stream's work up to a place; waits while another thread runs a piece of it.
void run_until(Queue* queue, uint64_t place) {
  {
    std::lock_guard<std::mutex> lock(state);
    if (queue->is_done(place)) return;
  }
  WithoutPythonLock without;
  std::unique_lock<std::mutex> lock(state);
  while (!queue->is_done(place)) {
    if (queue->is_running) {
      changed.wait(lock);
      continue;
    }
    Queued next = std::move(queue->waiting.front());
    queue->waiting.pop_front();
    queue->is_running = true;
    queue->running = next.place;
    lock.unlock();
    std::exception_ptr error;
    try {
      next.task();
      next.task = nullptr;
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    queue->is_running = false;
    queued_tasks--;
    std::vector<void*> dead;
    if (queued_tasks == 0) dead.swap(limbo);
    changed.notify_all();
    lock.unlock();
    for (void* data : dead) std::free(data);
    if (error) std::rethrow_exception(error);
    lock.lock();
  }
}

void push(Queue* queue, Task task) {
  queue->waiting.push_back({++queue->given, std::move(task)});
  queued_tasks++;
}

void wait_on_host(const Mark& mark) {
  run_until(mark.queue, mark.place);
  std::lock_guard<std::mutex> lock(state);
  merge(host_knows, mark.knows);
}

// Later work of the stream comes behind the mark.
void wait_on_stream(const Mark& mark, c10::Stream stream) {
  Queue* other = mark.queue;
  bool is_eager;
  {
    std::lock_guard<std::mutex> lock(state);
    Queue* queue = queue_of(stream);
    if (queue == other) return;
    merge(queue->knows, mark.knows);
    if (other->is_done(mark.place) || !is_late(c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, other->device), other->id))) return;
    is_eager = !is_late(stream);
    if (!is_eager) push(queue, [other, place = mark.place] { run_until(other, place); });
  }
  if (is_eager) run_until(other, mark.place);
}

void* aligned(size_t bytes) {
  void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  TORCH_CHECK(data, "simulated GPU: the host has no memory for ", bytes, " bytes");
  std::memset(data, POISON, bytes);
  return data;
}

int64_t rounded(size_t bytes) { return (static_cast<int64_t>(bytes) + 511) / 512 * 512; }

void release(void* data, size_t bytes) {
  std::memset(data, POISON, bytes);
  std::lock_guard<std::mutex> lock(state);
  if (queued_tasks) limbo.push_back(data);
  else std::free(data);
}

// Memory that streams still use, and for which record_stream() was called, lives until they are done.
void free_block(void* data) {
  std::unique_lock<std::mutex> lock(state);
  auto found = blocks.find(data);
  Block block = std::move(found->second);
  blocks.erase(found);
  memories[block.device].now -= rounded(block.bytes);
  for (auto& use : block.uses)
    if (!block.recorded.count(use.queue) && !knows(block.queue, use)) block.queue->freed.push_back(use);
  block.recorded.insert(block.queue);
  auto left = std::make_shared<int>(1);
  auto done = [left, data, bytes = block.bytes] {
    bool is_last;
    {
      std::lock_guard<std::mutex> lock(state);
      is_last = --*left == 0;
    }
    if (is_last) release(data, bytes);
  };
  for (Queue* queue : block.recorded)
    if (queue->id && !queue->waiting.empty()) {
      ++*left;
      push(queue, done);
    }
  lock.unlock();
  done();
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(CUDA, device_of_thread);
    if (!bytes) return {nullptr, nullptr, &free_block, device};
    touch(device.index());
    std::vector<Use> racing;
    void* data;
    {
      std::lock_guard<std::mutex> lock(state);
      auto& memory = memories[device.index()];
      TORCH_CHECK_WITH(OutOfMemoryError, memory.now + rounded(bytes) <= memory.limit,
                       "CUDA out of memory. Tried to allocate ", bytes, " bytes (simulated)");
      data = aligned(bytes);
      memory.now += rounded(bytes);
      memory.peak = std::max(memory.peak, memory.now);
      Queue* queue = queue_of(current_stream(device.index()));
      for (auto& use : queue->freed)
        if (!knows(queue, use)) racing.push_back(use);
      queue->freed.clear();
      blocks[data] = Block{data, bytes, device.index(), queue, {}, {}};
    }
    for (auto& use : racing)
      report("race", "memory that " + use.by + " uses on " + name_of(use.queue) +
                         " was freed without record_stream(), and is allocated again");
    return {data, data, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

void free_pinned(void* data) {
  std::lock_guard<std::mutex> lock(state);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device host(c10::DeviceType::CPU);
    if (!bytes) return {nullptr, nullptr, &free_pinned, host};
    void* data = aligned(bytes);
    std::lock_guard<std::mutex> lock(state);
    pinned[data] = bytes;
    return {data, data, &free_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory device_memory;
PinnedMemory host_memory;
const bool is_registered = (c10::SetAllocator(CUDA, &device_memory), true);

}  // namespace

c10::DeviceIndex device_count() { return DEVICES; }
c10::DeviceIndex current_device() { return device_of_thread; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto before = device_of_thread;
  if (device >= 0) {
    TORCH_CHECK(device < DEVICES, "CUDA error: invalid device ordinal");
    device_of_thread = device;
  }
  return before;
}

at::Generator& device_generator(c10::DeviceIndex device) {
  static at::Generator generators[MOST_DEVICES];
  if (!generators[device].defined()) generators[device] = at::detail::createCPUGenerator();
  return generators[device];
}

void report(const char* kind, const std::string& what) {
  if (report_to) report_to(kind, what.c_str());
}

void touch(c10::DeviceIndex device) {
  thread_local int seen_in = -1;
  thread_local unsigned seen = 0;
  if (seen_in != epoch) {
    seen_in = epoch;
    seen = 0;
  }
  if (seen & (1u << device)) return;
  seen |= 1u << device;
  report("touch", std::to_string(device));
}

void host_waits(const std::string& why) {
  if (watches_waits) report("wait", why);
}

c10::Allocator* memory() { return &device_memory; }
c10::Allocator* pinned_memory() { return &host_memory; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(state);
  auto found = pinned.upper_bound(data);
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(data) < static_cast<const char*>(found->first) + found->second;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), stream_of_thread[device]);
}

bool is_late(c10::Stream stream) { return DELAYS && stream.id() != 0; }

void submit(c10::Stream stream, Task task) {
  if (is_late(stream)) {
    std::lock_guard<std::mutex> lock(state);
    push(queue_of(stream), std::move(task));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state);
    queue_of(stream)->given++;
  }
  task();
}

void deliver(c10::Stream stream, Task task) {
  std::lock_guard<std::mutex> lock(state);
  push(queue_of(stream), std::move(task));
}

void finish(c10::Stream stream) {
  Mark mark;
  {
    std::lock_guard<std::mutex> lock(state);
    mark = mark_of(queue_of(stream));
  }
  wait_on_host(mark);
}

void record_stream(const void* data, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(state);
  auto found = blocks.find(data);
  if (found != blocks.end()) found->second.recorded.insert(queue_of(stream));
}

void use(const void* data, int64_t first, int64_t last, bool writes, c10::Stream stream,
         const std::string& by) {
  std::vector<std::string> races;
  {
    std::lock_guard<std::mutex> lock(state);
    if (queues.size() < 2) return;
    auto found = blocks.find(data);
    if (found == blocks.end()) return;
    Queue* queue = queue_of(stream);
    Use now{queue, queue->given + 1, first, last, writes, by};
    auto& uses = found->second.uses;
    std::vector<Use> kept;
    for (auto& use : uses) {
      bool is_ordered = knows(queue, use);
      bool overlaps = use.first < last && first < use.last;
      if (overlaps && !is_ordered && (writes || use.writes))
        races.push_back(by + (writes ? " writes" : " reads") + " on " + name_of(queue) +
                        " what " + use.by + (use.writes ? " wrote" : " read") + " on " +
                        name_of(use.queue) + ", without waiting for it");
      bool is_replaced = is_ordered && first <= use.first && use.last <= last &&
                         (writes || !use.writes) && (writes || use.queue == queue);
      if (!is_replaced) kept.push_back(std::move(use));
    }
    kept.push_back(std::move(now));
    if (kept.size() > 256) kept.erase(kept.begin());
    uses.swap(kept);
  }
  for (auto& race : races) report("race", race);
}

// What torch calls for a device and its streams.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    return c10::Device(CUDA, exchange_device(d.index()));
  }
  c10::Device getDevice() const override { return c10::Device(CUDA, device_of_thread); }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) device_of_thread = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return current_stream(index(d)); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, index(d)));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, index(d)), ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = current_stream(s.device_index());
    stream_of_thread[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    touch(stream.device_index());
    if (!*event) *event = new Mark;
    std::lock_guard<std::mutex> lock(state);
    *static_cast<Mark*>(*event) = mark_of(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_on_stream(*static_cast<Mark*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    if (event) wait_on_host(*static_cast<Mark*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    host_waits("event.synchronize()");
    if (event) wait_on_host(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> time =
        static_cast<Mark*>(last)->time - static_cast<Mark*>(first)->time;
    return time.count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    finish(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream.synchronize()");
    finish(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("synchronize()");
    std::vector<Queue*> all;
    {
      std::lock_guard<std::mutex> lock(state);
      for (auto& queue : queues)
        if (queue->device == device) all.push_back(queue.get());
    }
    for (Queue* queue : all)
      finish(c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), queue->id));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), stream);
  }

 private:
  static c10::DeviceIndex index(c10::Device d) { return d.index() < 0 ? device_of_thread : d.index(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace simulated_gpu

namespace at {

// The class that torch looks up by this name the first time that it asks about CUDA.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated_gpu::DEVICES; }
  int getNumGPUs() const override { return simulated_gpu::DEVICES; }
  DeviceIndex current_device() const override { return simulated_gpu::current_device(); }
  DeviceIndex getCurrentDevice() const override { return simulated_gpu::current_device(); }
  void setCurrentDevice(DeviceIndex d) const override { simulated_gpu::exchange_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return simulated_gpu::exchange_device(d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return simulated_gpu::exchange_device(d); }
  Allocator* getCUDADeviceAllocator() const override { return simulated_gpu::memory(); }
  Allocator* getPinnedMemoryAllocator() const override { return simulated_gpu::pinned_memory(); }
  bool isPinnedPtr(const void* data) const override { return simulated_gpu::is_pinned(data); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override {
    return simulated_gpu::device_generator(d < 0 ? simulated_gpu::current_device() : d);
  }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, simulated_gpu::current_device()); }
  std::string showConfig() const override { return "a simulated GPU"; }
  void deviceSynchronize(DeviceIndex d) const override {
    c10::impl::getDeviceGuardImpl(kCUDA)->synchronizeDevice(d);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// What Python calls by ctypes, without the interpreter's lock.
extern "C" {
using namespace simulated_gpu;

static c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, static_cast<c10::DeviceIndex>(device)), id);
}

void sim_report_to(void (*function)(const char*, const char*)) { report_to = function; }
void sim_run_python(void (*function)(int64_t)) { run_python = function; }
void sim_watch_waits(int on) { watches_waits = on != 0; }
void sim_new_epoch() { epoch++; }
void sim_touch(int device) { touch(static_cast<c10::DeviceIndex>(device)); }
int sim_device_count() { return DEVICES; }
int sim_current_device() { return device_of_thread; }
void sim_set_device(int device) { device_of_thread = static_cast<c10::DeviceIndex>(device); }
int64_t sim_current_stream(int device) { return stream_of_thread[device]; }
void sim_set_stream(int device, int64_t id) { stream_of_thread[device] = id; }

int64_t sim_new_stream(int device) {
  return c10::impl::getDeviceGuardImpl(CUDA)->getNewStream(c10::Device(CUDA, static_cast<c10::DeviceIndex>(device)), 0).id();
}
void sim_finish_stream(int device, int64_t id) { finish(stream_of(device, id)); }
void sim_finish_device(int device) {
  c10::impl::getDeviceGuardImpl(CUDA)->synchronizeDevice(static_cast<c10::DeviceIndex>(device));
}
// 1: all of the stream's work is done
int sim_is_idle(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(state);
  return queue_of(stream_of(device, id))->is_done(UINT64_MAX);
}

// Work that Python does, by number.
void sim_submit(int device, int64_t id, int64_t number) {
  submit(stream_of(device, id), [number] { run_python(number); });
}

void* sim_record(void* mark, int device, int64_t id) {
  c10::impl::getDeviceGuardImpl(CUDA)->record(&mark, stream_of(device, id), static_cast<c10::DeviceIndex>(device),
                                              c10::EventFlag::PYTORCH_DEFAULT);
  return mark;
}
void sim_wait_on_stream(void* mark, int device, int64_t id) {
  wait_on_stream(*static_cast<Mark*>(mark), stream_of(device, id));
}
void sim_wait_on_host(void* mark) { wait_on_host(*static_cast<Mark*>(mark)); }
double sim_elapsed_ms(void* first, void* last) {
  return c10::impl::getDeviceGuardImpl(CUDA)->elapsedTime(first, last, 0);
}
void sim_free_mark(void* mark) { delete static_cast<Mark*>(mark); }

int64_t sim_memory(int device) { std::lock_guard<std::mutex> lock(state); return memories[device].now; }
int64_t sim_peak_memory(int device) { std::lock_guard<std::mutex> lock(state); return memories[device].peak; }
int64_t sim_memory_limit(int device) { std::lock_guard<std::mutex> lock(state); return memories[device].limit; }
void sim_reset_peak(int device) {
  std::lock_guard<std::mutex> lock(state);
  memories[device].peak = memories[device].now;
}

// torch's storage.resize_(), for a StorageImpl on the device
void sim_resize(void* storage, size_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  OnDevice on(impl->device().index());
  auto data = device_memory.allocate(bytes);
  if (bytes && impl->nbytes()) std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}
}
