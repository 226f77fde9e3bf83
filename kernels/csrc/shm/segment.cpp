#include "shm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace shoal {
namespace {

constexpr const char* kShmFolder = "/dev/shm";

std::runtime_error failure(const char* what, const std::string& name) {
  return std::runtime_error(std::string(what) + " of shared memory " + name + " failed: " + std::strerror(errno));
}

}  // namespace

void Segment::swap(Segment& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
}

void Segment::reset() {
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
  data_ = nullptr;
  size_ = 0;
  fd_ = -1;
}

Segment Segment::create(const std::string& label, size_t bytes) {
  const size_t free_bytes = shm_free_bytes();
  if (bytes > free_bytes) throw ShmCapacityError(label, bytes, free_bytes);
  Segment segment;
  segment.fd_ = open(kShmFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (segment.fd_ < 0) throw failure("creation", label);
  flock(segment.fd_, LOCK_SH | LOCK_NB);
  const int error = posix_fallocate(segment.fd_, 0, static_cast<off_t>(bytes));
  if (error == ENOSPC || error == ENOMEM) throw ShmCapacityError(label, bytes, shm_free_bytes());
  if (error != 0) {
    errno = error;
    throw failure("reservation", label);
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, segment.fd_, 0);
  if (at == MAP_FAILED) throw failure("mapping", label);
  segment.data_ = static_cast<uint8_t*>(at);
  segment.size_ = bytes;
  return segment;
}

void Segment::link(const std::string& name) {
  const std::string from = "/proc/self/fd/" + std::to_string(fd_);
  const std::string to = std::string(kShmFolder) + "/" + name;
  if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) != 0) throw failure("naming", name);
}

Segment Segment::attach(const std::string& name, bool writable) {
  Segment segment;
  segment.fd_ = shm_open(("/" + name).c_str(), O_RDWR, 0600);
  if (segment.fd_ < 0) {
    if (errno == ENOENT) return Segment();
    throw failure("opening", name);
  }
  flock(segment.fd_, LOCK_SH | LOCK_NB);
  struct stat status {};
  if (fstat(segment.fd_, &status) != 0) throw failure("stat", name);
  const size_t bytes = static_cast<size_t>(status.st_size);
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* at = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE, segment.fd_, 0);
  if (at == MAP_FAILED) throw failure("mapping", name);
  segment.data_ = static_cast<uint8_t*>(at);
  segment.size_ = bytes;
  return segment;
}

size_t shm_free_bytes() {
  struct statvfs status {};
  if (statvfs(kShmFolder, &status) != 0) return 0;
  return static_cast<size_t>(status.f_bavail) * status.f_frsize;
}

int sweep_segments(const std::string& prefix, int age_s) {
  DIR* folder = opendir(kShmFolder);
  if (folder == nullptr) return 0;
  int num_removed = 0;
  const time_t now = time(nullptr);
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, prefix.c_str(), prefix.size()) != 0) continue;
    const std::string name = std::string("/") + entry->d_name;
    const int fd = shm_open(name.c_str(), O_RDWR, 0600);
    if (fd < 0) continue;
    struct stat status {};
    const bool is_old = fstat(fd, &status) == 0 && now - status.st_mtime >= age_s && status.st_uid == geteuid();
    if (is_old && flock(fd, LOCK_EX | LOCK_NB) == 0 && shm_unlink(name.c_str()) == 0) ++num_removed;
    close(fd);
  }
  closedir(folder);
  return num_removed;
}

}  // namespace shoal
