// One POSIX shared-memory object: reserved in full, mapped, named late and unlinked as soon as may be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace shoal {

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() { reset(); }

  // Reserves `bytes` of POSIX shared memory (so that a full /dev/shm is an error here and not a SIGBUS later) and maps it
  // for reading and writing. It has no name yet: if this process dies now, it is gone. `label` is for errors. Throws
  // ShmCapacityError or std::runtime_error.
  static Segment create(const std::string& label, size_t bytes);

  // Gives it the name /dev/shm/`name`, under which others can attach until someone unlinks it.
  void link(const std::string& name);

  // Maps an existing one. Returns an unmapped segment when there is none (yet).
  static Segment attach(const std::string& name, bool writable);

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset();

 private:
  void swap(Segment& other) noexcept;

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  // Kept open with a shared lock by whoever has the object mapped: a sweeper can tell objects in use from leftovers.
  int fd_ = -1;
};

// what() is "name|needed|free", in bytes: the Python face writes the sentence.
struct ShmCapacityError : std::runtime_error {
  ShmCapacityError(const std::string& name, size_t needed, size_t free)
      : std::runtime_error(name + "|" + std::to_string(needed) + "|" + std::to_string(free)) {}
};

// Bytes free on the file system of POSIX shared memory.
size_t shm_free_bytes();

// Unlinks objects whose name begins with `prefix`, which are older than `age_s` and which no live process has open.
// Only a process killed in the moments between naming and the last attachment leaves one. Returns how many.
int sweep_segments(const std::string& prefix, int age_s);

}  // namespace shoal
