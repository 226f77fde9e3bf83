// All-to-all of bytes among the processes of one host through shared memory, without copies: a sender writes its
// messages into a segment of its own and publishes where they lie; receivers read them there.
//
// Exchange m of a rank: (1) allocate room for all its messages in its own segment, not touching those of exchanges m-1
// and m-2; (2) publish (offset, size) per receiver, then the number m; (3) wait until every peer has published m.
// Why two exchanges are kept: a rank that is in send_buffers(m) has completed exchange m-1, so every peer has published
// m-1 and thereby left behind what it received in m-3. Nobody waits for readers.
//
// A sender whose segment is too small makes a new one (its generation) and names it when it publishes; receivers attach
// when they meet it, and the last one to attach unlinks the name, so a name exists for moments only.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "shm/segment.h"

namespace shoal {

enum class BoxFault : int32_t { kNone = 0, kTimeout = 1, kDied = 2, kAborted = 3, kSize = 4, kAttach = 5 };

// What ended an exchange or the epoch. `text` and `kind` of the first rank that failed are seen by all.
struct BoxOutcome {
  BoxFault fault = BoxFault::kNone;
  BoxFault cause = BoxFault::kNone;  // Of an abort: why the first rank gave up.
  int rank = -1;                     // Who reported it; for kSize and kAttach, whose message it is.
  std::vector<int> missing;          // Who had not arrived, or who died.
  std::string text;
};

class Boxes {
 public:
  // Rank 0 creates the control block `name`, the others attach; returns when all `num_ranks` have. Throws
  // ShmCapacityError; std::runtime_error naming the ranks that did not come within `timeout_s`.
  Boxes(std::string name, int rank, int num_ranks, double timeout_s, double spin_us);
  ~Boxes();

  // Addresses of the next messages (64-byte aligned). Sizes are those on the wire: multiples of 64.
  void send_buffers(const int64_t* sizes, int64_t* addresses);

  // Publishes and waits. `sizes` are what the peers must have sent. On success fills `addresses`.
  BoxOutcome exchange(const int64_t* sizes, double timeout_s, int64_t* addresses);

  // First one wins; wakes every waiter on the host. Safe from any thread while the object lives.
  void abort(BoxFault kind, const std::string& text);

  // The abort of the epoch, if any; fault is kNone otherwise.
  BoxOutcome aborted() const;

  int64_t segment_bytes() const { return static_cast<int64_t>(own_.size()); }

 private:
  struct Row;      // One rank's part of the control block.
  struct Control;  // The control block's head.
  struct Peer {
    Segment segment;
    uint32_t generation = 0;
    std::deque<std::pair<uint32_t, Segment>> old;  // (first exchange of its successor, mapping)
    bool is_visible = false;
    int pidfd = -1;
  };
  struct Extent {
    int64_t begin, end;
  };

  Row* row(int rank) const;
  Control* control() const;
  std::string segment_name(int rank, uint32_t generation) const;
  // A message was completed here when all had published, but a peer may not have opened this rank's newest segment yet:
  // waits until all that still will have, at most half a second, then makes sure that the name is gone.
  void await_readers();
  void leave();
  BoxOutcome swap(const int64_t* sizes, double timeout_s, int64_t* addresses);
  int64_t allocate(int64_t bytes);
  void grow(int64_t bytes);
  void publish(uint32_t sequence);
  bool wait_for(int peer, uint32_t sequence, int64_t deadline_ns, BoxOutcome* outcome);
  bool is_dead(int peer) const;
  bool resolve(int peer, uint32_t sequence, int64_t expected, int64_t* address, BoxOutcome* outcome);
  BoxOutcome fail(BoxFault fault, uint32_t sequence, const std::string& text);
  std::vector<int> missing_at(uint32_t sequence) const;

  std::string name_;
  int rank_, num_ranks_;
  double spin_us_;
  Segment control_;
  Segment own_;
  std::deque<std::pair<uint32_t, Segment>> old_own_;
  bool is_linked_ = true;           // Whether own_ has had its name.
  uint32_t generation_ = 0;
  uint32_t grown_at_ = 0;           // The exchange that first used the current generation.
  uint32_t sequence_ = 0;           // Of the exchange being prepared or last completed.
  std::vector<int64_t> sizes_;      // Of the messages being prepared.
  std::vector<int64_t> offsets_;
  std::deque<Extent> live_;         // Of the last two exchanges in the current segment.
  std::vector<Peer> peers_;
};

}  // namespace shoal
