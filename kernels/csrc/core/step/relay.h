// Relay: what one rank carries between the ranks of its host and owners on other hosts, for one lookup.
//
// Each owner on another host is carried by one rank of this host. The requests of all ranks of this host for that owner
// meet here: their ids are de-duplicated per table, in (local rank, first occurrence) order, so that a row crosses the
// network once per host; rows that come back are handed out; gradients are summed in local rank order before they go.
//
// A request message of one local rank holds a uint64 count of bytes per carried owner (ascending), then the ids section
// (wire.h) for each of them; both parts and every section begin at a multiple of 64 bytes. A row or gradient message
// between a local rank and this one holds, per carried owner, the rows of that rank's section in its order, likewise.
#pragma once

#include <cstdint>
#include <vector>

#include "core/step/plan.h"
#include "core/step/lookup.h"

namespace shoal::step {

class Relay {
 public:
  // `owners`: the ranks on other hosts that this rank carries for, ascending. `locals`: the ranks of this host.
  Relay(StepPlan* plan, std::vector<int> owners, std::vector<int> locals);
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Reads the request messages of the local ranks ([locals]); 0 bytes: asks for nothing. Throws ProtocolViolation naming
  // the rank for counts that do not add up, before a byte outside its message is read.
  void merge(const int64_t* sources, const int64_t* source_bytes);
  // Bytes of the merged ids section for each rank [world]; 0 for those that are not carried.
  void id_bytes(int64_t* bytes) const;
  void write_ids(const int64_t* destinations) const;
  // Bytes of rows that come back from each rank [world], and of gradients that go to it.
  const std::vector<int64_t>& row_bytes() const { return row_bytes_; }
  const std::vector<int64_t>& grad_bytes() const { return grad_bytes_; }
  // Bytes of the row messages for the local ranks [locals], and of the gradient messages from them.
  const std::vector<int64_t>& local_row_bytes() const { return local_row_bytes_; }
  const std::vector<int64_t>& local_grad_bytes() const { return local_grad_bytes_; }
  // Copies rows received from owners (`sources` [world]) into the messages for local ranks (`destinations` [locals]).
  void hand_out(const int64_t* sources, const int64_t* destinations) const;
  // Sums the gradient messages of the local ranks (`sources` [locals]) into sections for owners (`destinations` [world]).
  void sum(const int64_t* sources, const int64_t* destinations) const;
  // Rows asked for by local ranks, and after merging.
  int64_t num_asked() const;
  int64_t num_merged() const;

 private:
  // One local rank's request for one table of one owner.
  struct Part {
    int local;
    int64_t count;
    int64_t map_start;      // into Carried::map: number of each row among the merged ones of the table
    int64_t row_offset;     // bytes into the row message of this owner's section
    int64_t grad_offset;
  };
  // The merged request for one table of one owner.
  struct Merged {
    int table;
    int64_t count;
    int64_t id_start;       // into Carried::ids
    int64_t row_offset;     // bytes into the section that the owner returns
    int64_t grad_offset;
    std::vector<Part> parts;  // by local rank
  };
  struct Carried {
    int owner = 0;
    std::vector<Merged> tables;
    std::vector<Run> runs;  // as the wire format wants them
    Buffer<uint64_t> ids;
    Buffer<uint32_t> map;
    std::vector<int64_t> row_starts, grad_starts;  // per local rank: where the owner's part of its message begins
    int64_t num_asked = 0, num_merged = 0;
  };

  void read_requests(const int64_t* sources, const int64_t* source_bytes);
  void merge_owner(size_t index);
  const std::byte* gradients_of(const Carried& carried, const Part& part, const int64_t* sources) const;
  void sum_plain(const Carried& carried, const Merged& merged, const int64_t* sources, float* sums) const;
  void sum_encoded(const Carried& carried, const Merged& merged, const int64_t* sources, std::byte* out) const;
  void lay_out();

  StepPlan* plan_;
  std::vector<int> owners_, locals_;
  std::vector<Carried> carried_;
  // [owners][locals]: each request section in the received messages.
  std::vector<const std::byte*> sections_;
  std::vector<int64_t> section_bytes_;
  std::vector<int64_t> row_bytes_, grad_bytes_, local_row_bytes_, local_grad_bytes_;
};

}  // namespace shoal::step
