// Large zeroed memory straight from the system: page-aligned, huge pages where the system grants them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

namespace headrace {

class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc when the system refuses.
  explicit Memory(int64_t size_bytes) : size_bytes_(size_bytes) {
    if (size_bytes == 0) return;
    void* data = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(data);
    madvise(data_, static_cast<size_t>(size_bytes), MADV_HUGEPAGE);  // advice only: a refusal changes nothing
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
  }

  uint8_t* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace headrace
