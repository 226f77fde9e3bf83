#include "shm/boxes.h"

#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace shoal {
namespace {

constexpr int kTableSlots = 4;           // Published exchanges that can be looked up; two are needed.
constexpr int kGenerations = 8;          // Attachment counters; a receiver lags by two generations at most.
constexpr int64_t kSliceNs = 20'000'000;  // Between looks at liveness and abort while asleep.
constexpr int64_t kMinSegment = 1 << 18;
constexpr int64_t kFarewellNs = 500'000'000;  // How long a leaving rank waits for peers about to read its last message.
constexpr uint32_t kAbsent = 0, kPresent = 1, kLeft = 2;

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t value, int64_t ns) {
  timespec t{ns / 1'000'000'000LL, ns % 1'000'000'000LL};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &t, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool has_reached(uint32_t published, uint32_t wanted) { return static_cast<int32_t>(published - wanted) >= 0; }

int open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

uint64_t pid_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

}  // namespace

struct Boxes::Control {
  uint32_t num_ranks;
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> abort_state;  // 0 none, 1 being written, 2 readable.
  int32_t abort_rank;
  int32_t abort_kind;
  char abort_text[488];
};

struct Message {
  int64_t offset, size;
};

// Followed by kTableSlots tables of num_ranks messages.
struct alignas(64) Boxes::Row {
  std::atomic<uint32_t> sequence;  // The futex word: number of exchanges published.
  std::atomic<uint32_t> waiters;
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> presence;
  std::atomic<uint64_t> pid_namespace;
  alignas(64) std::atomic<uint32_t> attached[kGenerations];
  uint32_t generation[kTableSlots];

  Message* table(uint32_t sequence, int num_ranks) {
    return reinterpret_cast<Message*>(this + 1) + static_cast<size_t>(sequence % kTableSlots) * num_ranks;
  }
  static size_t bytes(int num_ranks) {
    const size_t size = sizeof(Row) + sizeof(Message) * kTableSlots * static_cast<size_t>(num_ranks);
    return (size + 127) & ~size_t{127};
  }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "futex words are plain 32-bit words");

Boxes::Control* Boxes::control() const { return reinterpret_cast<Control*>(control_.data()); }

Boxes::Row* Boxes::row(int rank) const {
  return reinterpret_cast<Row*>(control_.data() + 512 + Row::bytes(num_ranks_) * static_cast<size_t>(rank));
}

std::string Boxes::segment_name(int rank, uint32_t generation) const {
  return name_ + "-r" + std::to_string(rank) + "-g" + std::to_string(generation);
}

Boxes::Boxes(std::string name, int rank, int num_ranks, double timeout_s, double spin_us)
    : name_(std::move(name)),
      rank_(rank),
      num_ranks_(num_ranks),
      spin_us_(spin_us),
      sizes_(static_cast<size_t>(num_ranks)),
      offsets_(static_cast<size_t>(num_ranks)),
      peers_(static_cast<size_t>(num_ranks)) {
  static_assert(sizeof(Control) <= 512, "the head of the control block is 512 bytes");
  const int64_t deadline = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  if (rank == 0) {
    // Fresh shared memory is zero: every counter starts at 0.
    // It gets its name when it is complete.
    control_ = Segment::create(name_, 512 + Row::bytes(num_ranks) * static_cast<size_t>(num_ranks));
    control()->num_ranks = static_cast<uint32_t>(num_ranks);
    control_.link(name_);
  }
  const auto give_up = [&](const std::string& why) {
    if (rank_ == 0) shm_unlink(("/" + name_).c_str());
    throw std::runtime_error(why);
  };
  while (!control_) {
    control_ = Segment::attach(name_, true);
    if (control_) break;
    if (now_ns() > deadline) give_up("rank 0 did not create the shared-memory block " + name_);
    usleep(500);
  }
  if (control()->num_ranks != static_cast<uint32_t>(num_ranks)) give_up("another number of ranks uses " + name_);
  Row* mine = row(rank_);
  mine->pid.store(static_cast<int32_t>(getpid()));
  mine->pid_namespace.store(pid_namespace());
  mine->presence.store(kPresent, std::memory_order_release);
  if (control()->attached.fetch_add(1) + 1 == static_cast<uint32_t>(num_ranks)) shm_unlink(("/" + name_).c_str());
  while (control()->attached.load() < static_cast<uint32_t>(num_ranks)) {
    if (now_ns() > deadline) {
      std::string who;
      for (int r = 0; r < num_ranks; ++r) {
        if (row(r)->presence.load() == kAbsent) who += " " + std::to_string(r);
      }
      give_up("local ranks" + who + " did not attach the shared-memory block " + name_);
    }
    usleep(200);
  }
  for (int r = 0; r < num_ranks; ++r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    // In another pid namespace (containers that share /dev/shm) the number means another process or none.
    peer.is_visible = r != rank_ && row(r)->pid_namespace.load() == pid_namespace();
    if (peer.is_visible) peer.pidfd = open_pidfd(row(r)->pid.load());
  }
}

Boxes::~Boxes() {
  leave();
  if (own_ && is_linked_) await_readers();
  for (Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

void Boxes::leave() {
  if (control_) row(rank_)->presence.store(kLeft);
}

void Boxes::await_readers() {
  const std::string name = "/" + segment_name(rank_, generation_);
  const auto is_attached = [&] {
    const uint32_t attached = row(rank_)->attached[generation_ % kGenerations].load();
    return attached + 1 >= static_cast<uint32_t>(num_ranks_);
  };
  const auto may_attach = [&](int r) {
    return r != rank_ && row(r)->presence.load() == kPresent && has_reached(row(r)->sequence.load(), grown_at_) &&
           !is_dead(r);
  };
  const int64_t deadline = now_ns() + kFarewellNs;
  while (!is_attached() && now_ns() < deadline) {
    bool has_readers = false;
    for (int r = 0; r < num_ranks_ && !has_readers; ++r) has_readers = may_attach(r);
    if (!has_readers) break;
    usleep(200);
  }
  if (!is_attached()) shm_unlink(name.c_str());
}

void Boxes::grow(int64_t bytes) {
  // Room for three exchanges of this size, as two are kept while a third is written.
  const int64_t wanted = std::max({kMinSegment, 3 * (bytes + bytes / 4), static_cast<int64_t>(own_.size()) * 3 / 2});
  const int64_t rounded = (wanted + (1 << 16) - 1) & ~static_cast<int64_t>((1 << 16) - 1);
  const uint32_t next = generation_ + 1;
  row(rank_)->attached[next % kGenerations].store(0);
  Segment segment = Segment::create(segment_name(rank_, next), static_cast<size_t>(rounded));
  if (own_) old_own_.emplace_back(sequence_, std::move(own_));
  own_ = std::move(segment);
  is_linked_ = false;
  generation_ = next;
  grown_at_ = sequence_;
  live_.clear();
}

int64_t Boxes::allocate(int64_t bytes) {
  const auto fits = [&](int64_t at) {
    if (at + bytes > static_cast<int64_t>(own_.size())) return false;
    return std::all_of(live_.begin(), live_.end(), [&](const Extent& e) { return at >= e.end || at + bytes <= e.begin; });
  };
  // The lowest place that fits: memory that is in use anyway stays in the caches.
  int64_t best = -1;
  if (own_) {
    if (fits(0)) best = 0;
    for (const Extent& e : live_) {
      if (fits(e.end) && (best < 0 || e.end < best)) best = e.end;
    }
  }
  if (best < 0) {
    grow(bytes);
    best = 0;
  }
  live_.push_back({best, best + bytes});
  while (live_.size() > 2) live_.pop_front();
  return best;
}

void Boxes::send_buffers(const int64_t* sizes, int64_t* addresses) {
  const auto world = static_cast<size_t>(num_ranks_);
  ++sequence_;
  while (!old_own_.empty() && has_reached(sequence_, old_own_.front().first + 3)) old_own_.pop_front();
  int64_t total = 0;
  for (size_t r = 0; r < world; ++r) total += sizes[r];
  int64_t at = allocate(total);
  for (size_t r = 0; r < world; ++r) {
    sizes_[r] = sizes[r];
    offsets_[r] = at;
    addresses[r] = reinterpret_cast<int64_t>(own_.data() + at);
    at += sizes[r];
  }
}

void Boxes::publish(uint32_t sequence) {
  Row* mine = row(rank_);
  Message* table = mine->table(sequence, num_ranks_);
  for (int r = 0; r < num_ranks_; ++r) table[r] = {offsets_[static_cast<size_t>(r)], sizes_[static_cast<size_t>(r)]};
  mine->generation[sequence % kTableSlots] = generation_;
  if (!is_linked_) {
    // Named only now that peers are about to open it: a process killed while it fills its first message leaves nothing.
    own_.link(segment_name(rank_, generation_));
    is_linked_ = true;
  }
  // Sequentially consistent on both sides: either we see the waiter or it sees the new number.
  mine->sequence.store(sequence);
  if (mine->waiters.load() != 0) futex_wake_all(&mine->sequence);
}

bool Boxes::is_dead(int peer) const {
  const Peer& state = peers_[static_cast<size_t>(peer)];
  if (!state.is_visible) return false;
  if (state.pidfd < 0) return kill(row(peer)->pid.load(), 0) != 0 && errno == ESRCH;
  // A pidfd also tells that a process is a zombie, and cannot be fooled by a reused number.
  pollfd entry{state.pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
}

std::vector<int> Boxes::missing_at(uint32_t sequence) const {
  std::vector<int> missing;
  for (int r = 0; r < num_ranks_; ++r) {
    if (!has_reached(row(r)->sequence.load(), sequence)) missing.push_back(r);
  }
  return missing;
}

bool Boxes::wait_for(int peer, uint32_t sequence, int64_t deadline_ns, BoxOutcome* outcome) {
  Row* theirs = row(peer);
  const auto arrived = [&] { return has_reached(theirs->sequence.load(), sequence); };
  if (spin_us_ > 0) {
    const int64_t spin_until = now_ns() + static_cast<int64_t>(spin_us_ * 1e3);
    do {
      for (int i = 0; i < 64; ++i) {
        if (has_reached(theirs->sequence.load(std::memory_order_acquire), sequence)) return true;
        cpu_relax();
      }
    } while (now_ns() < spin_until);
  }
  while (true) {
    theirs->waiters.fetch_add(1);
    const uint32_t seen = theirs->sequence.load();
    if (!has_reached(seen, sequence)) futex_wait(&theirs->sequence, seen, kSliceNs);
    theirs->waiters.fetch_sub(1);
    if (arrived()) return true;
    // What was published counts even if its sender left right after; only then look for reasons to give up.
    if (control()->abort_state.load() == 2) {
      if (arrived()) return true;
      *outcome = aborted();
      return false;
    }
    std::vector<int> dead;
    for (int r : missing_at(sequence)) {
      if (r != rank_ && is_dead(r)) dead.push_back(r);
    }
    if (!dead.empty() && !arrived()) {
      *outcome = fail(BoxFault::kDied, sequence, "");
      outcome->missing = dead;
      // It may have been killed between naming a new segment and publishing it.
      for (int r : dead) {
        const uint32_t next = peers_[static_cast<size_t>(r)].generation + 1;
        shm_unlink(("/" + segment_name(r, next)).c_str());
      }
      return false;
    }
    if (now_ns() >= deadline_ns && !arrived()) {
      *outcome = fail(BoxFault::kTimeout, sequence, "");
      return false;
    }
  }
}

BoxOutcome Boxes::fail(BoxFault fault, uint32_t sequence, const std::string& text) {
  BoxOutcome outcome;
  outcome.fault = fault;
  outcome.rank = rank_;
  outcome.missing = missing_at(sequence);
  outcome.text = text;
  return outcome;
}

bool Boxes::resolve(int peer, uint32_t sequence, int64_t expected, int64_t* address, BoxOutcome* outcome) {
  Row* theirs = row(peer);
  const Message message = theirs->table(sequence, num_ranks_)[rank_];
  const uint32_t generation = theirs->generation[sequence % kTableSlots];
  Peer& state = peers_[static_cast<size_t>(peer)];
  if (message.size != expected) {
    *outcome = fail(BoxFault::kSize, sequence,
                    "sends " + std::to_string(message.size) + " bytes where " + std::to_string(expected) + " are expected");
    outcome->rank = peer;
    return false;
  }
  while (!state.old.empty() && has_reached(sequence, state.old.front().first + 2)) state.old.pop_front();
  if (generation != state.generation) {
    const std::string name = segment_name(peer, generation);
    Segment segment = Segment::attach(name, false);
    if (!segment) {
      *outcome = fail(BoxFault::kAttach, sequence, "its segment " + name + " cannot be opened");
      outcome->rank = peer;
      return false;
    }
    if (theirs->attached[generation % kGenerations].fetch_add(1) + 2 == static_cast<uint32_t>(num_ranks_)) {
      shm_unlink(("/" + name).c_str());
    }
    if (state.segment) state.old.emplace_back(sequence, std::move(state.segment));
    state.segment = std::move(segment);
    state.generation = generation;
  }
  if (message.offset < 0 || message.offset + message.size > static_cast<int64_t>(state.segment.size())) {
    *outcome = fail(BoxFault::kSize, sequence, "published a message outside of its segment");
    outcome->rank = peer;
    return false;
  }
  *address = reinterpret_cast<int64_t>(state.segment.data() + message.offset);
  return true;
}

BoxOutcome Boxes::exchange(const int64_t* sizes, double timeout_s, int64_t* addresses) {
  BoxOutcome outcome = swap(sizes, timeout_s, addresses);
  // A rank that failed reads no more: those who leave need not wait for it.
  if (outcome.fault != BoxFault::kNone) leave();
  return outcome;
}

BoxOutcome Boxes::swap(const int64_t* sizes, double timeout_s, int64_t* addresses) {
  const uint32_t sequence = sequence_;
  BoxOutcome outcome = aborted();
  if (outcome.fault != BoxFault::kNone) return outcome;
  publish(sequence);
  const int64_t deadline = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  addresses[rank_] = reinterpret_cast<int64_t>(own_.data() + offsets_[static_cast<size_t>(rank_)]);
  // Everyone is waited for before anything is judged, and the segments of all are attached even if one is wrong: a name
  // must not outlive its use because its peer had another error.
  BoxOutcome first;
  for (int i = 1; i < num_ranks_; ++i) {
    const int peer = (rank_ + i) % num_ranks_;
    if (!wait_for(peer, sequence, deadline, &outcome)) return outcome;
    if (!resolve(peer, sequence, sizes[peer], &addresses[peer], &outcome) && first.fault == BoxFault::kNone) {
      first = outcome;
    }
  }
  return first;
}

void Boxes::abort(BoxFault kind, const std::string& text) {
  Control* head = control();
  uint32_t none = 0;
  if (head->abort_state.compare_exchange_strong(none, 1)) {
    head->abort_rank = rank_;
    head->abort_kind = static_cast<int32_t>(kind);
    const size_t length = std::min(text.size(), sizeof head->abort_text - 1);
    std::memcpy(head->abort_text, text.data(), length);
    head->abort_text[length] = '\0';
    head->abort_state.store(2);
  }
  for (int r = 0; r < num_ranks_; ++r) futex_wake_all(&row(r)->sequence);
}

BoxOutcome Boxes::aborted() const {
  BoxOutcome outcome;
  if (control()->abort_state.load() != 2) return outcome;
  outcome.fault = BoxFault::kAborted;
  outcome.cause = static_cast<BoxFault>(control()->abort_kind);
  outcome.rank = control()->abort_rank;
  outcome.text = std::string(control()->abort_text, strnlen(control()->abort_text, sizeof control()->abort_text));
  return outcome;
}

}  // namespace shoal
