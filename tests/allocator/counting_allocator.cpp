// A CPU allocator of torch that counts the bytes it has given out, and their peak. It delegates to the default one.
//
// Only memory that goes through this allocator is counted. Memory allocated before `count_from_now` keeps its own
// deleter, so freeing it changes no count.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, int64_t>& sizes = *new std::unordered_map<void*, int64_t>;  // never freed: used until exit
int64_t live_bytes = 0;
int64_t highest_bytes = 0;

void free_counted(void* memory) {
  if (memory == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(memory);
    live_bytes -= found->second;
    sizes.erase(found);
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(nbytes);
    if (memory != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[memory] = static_cast<int64_t>(nbytes);
      live_bytes += static_cast<int64_t>(nbytes);
      highest_bytes = std::max(highest_bytes, live_bytes);
    }
    return {memory, memory, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

extern "C" {

void count_from_now() {
  static auto* allocator = new CountingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

int64_t counted_live_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return live_bytes;
}

int64_t counted_peak_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return highest_bytes;
}

void reset_counted_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  highest_bytes = live_bytes;
}
}
