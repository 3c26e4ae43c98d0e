// The memory of the asynchronous device.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/device/async_device.h"

namespace sing::test {

namespace {

constexpr uint64_t kGrain = 512;  // as CUDA's allocator
constexpr int kPoison = 0xdb;

}  // namespace

// Like CUDA's caching allocator: blocks are reused by the stream that took them, without waiting.
DeviceBlockPtr AsyncDevice::allocate(uint64_t bytes, size_t stream) {
  Lock lock(mutex_);
  check(lock);
  context_ = true;
  const uint64_t taken = (std::max<uint64_t>(bytes, 1) + kGrain - 1) / kGrain * kGrain;
  const std::optional<uint64_t> record = this->record();
  const bool counts = befalls();
  const uint64_t number = allocations_;
  allocations_ += counts;
  const bool refused = counts && number >= refuse_from_ && number < refuse_until_;
  if (refused && record) refused_.push_back(*record);
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end() && !refused; ++it) {
    const DeviceBlock& block = **it;
    if (block.stream != stream || block.taken < taken || block.taken > taken + taken / 4) continue;
    if (best == kept_.end() || block.taken < (*best)->taken) best = it;
  }
  DeviceBlockPtr block;
  if (best != kept_.end()) {
    block = *best;
    kept_.erase(best);
    kept_bytes_ -= block->taken;
  } else {
    const auto fits = [&] {
      return used_ + kept_bytes_ + occupied_ + options_.context_bytes + taken <= options_.capacity;
    };
    if (!refused && !fits()) release_kept(lock);
    check(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, !refused && fits(), "CUDA out of memory. Tried to allocate ",
                     bytes, " bytes. GPU ", index_, " has a total capacity of ", options_.capacity,
                     " bytes, of which ", used_, " are in use.");
    block = std::make_shared<DeviceBlock>();
    block->owner = this;
    block->taken = taken;
    block->stream = stream;
    block->data = static_cast<std::byte*>(std::aligned_alloc(kGrain, taken));
    TORCH_CHECK(block->data != nullptr, "the host has no memory for the device");
  }
  block->bytes = bytes;
  block->recorded.clear();
  used_ += block->taken;
  return block;
}

bool AsyncDevice::settled(const DeviceBlock& block, size_t except) const {
  return std::all_of(block.pending.begin(), block.pending.end(),
                     [except](const auto& one) { return one.first == except; });
}

void AsyncDevice::free(const DeviceBlockPtr& block) noexcept {
  Lock lock(mutex_);
  bool waits = false;
  for (const auto& [stream, count] : block->pending) {
    // What reuses it is executed later if its stream waits for the others.
    const bool ordered = lines_[block->stream].after[stream] >= block->last[stream];
    if (stream == block->stream || ordered || lost_ || calls_ > killed_at_) continue;
    const auto& recorded = block->recorded;
    if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end()) {
      violations_.push_back("memory was given up while another stream uses it");
    }
    waits = true;
  }
  if (waits) {
    deferred_.push_back(block);
  } else {
    keep(block);
  }
}

void AsyncDevice::keep(const DeviceBlockPtr& block) {
  used_ -= block->taken;
  kept_bytes_ += block->taken;
  kept_.push_back(block);
  if (!options_.poison || lost_) return;
  Task task;
  task.uses = {block};
  task.work = [block] { std::memset(block->data, kPoison, block->taken); };
  Line& line = lines_[block->stream];
  ++block->pending[block->stream];
  block->last[block->stream] = ++line.after[block->stream];
  task.launched_ns = line.end_ns;  // takes no time of the device
  line.queue.push_back(std::move(task));
  changed_.notify_all();
}

void AsyncDevice::record_stream(const DeviceBlockPtr& block, size_t stream) {
  Lock lock(mutex_);
  if (stream != block->stream) block->recorded.push_back(stream);
}

// Waits for the device, as cudaFree does.
void AsyncDevice::release_kept(Lock& lock) {
  held_ = pool_held_ = false;
  std::vector<DeviceBlockPtr> going;
  changed_.wait(lock, [&] {
    return std::all_of(kept_.begin(), kept_.end(),
                       [](const DeviceBlockPtr& block) { return block->pending.empty(); });
  });
  going.swap(kept_);
  for (const DeviceBlockPtr& block : going) {
    kept_bytes_ -= block->taken;
    std::free(block->data);
    block->data = nullptr;
  }
}

void AsyncDevice::empty_cache() {
  synchronize();
  Lock lock(mutex_);
  release_kept(lock);
}

std::pair<uint64_t, uint64_t> AsyncDevice::memory() {
  Lock lock(mutex_);
  check(lock);
  const uint64_t taken = used_ + kept_bytes_ + occupied_ + options_.context_bytes;
  return {options_.capacity - std::min(taken, options_.capacity), options_.capacity};
}

}  // namespace sing::test
