// Rows as they travel between workers: sections of packed records, written straight into a message and read in place.
//
// A packed record is the record without its stamp: id, step, count, optimizer state, weights. A section is a head, then
// records of one row block, then deleted ids; sections begin 8-byte aligned. Rows are in no particular order: a receiver
// finds them by id. The Python twin is kernels/packed.py.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/store/cut.h"

namespace shoal {

struct SectionHead {
  int64_t table, block, num_rows, num_deleted;
  int64_t origin;     // Of changes: the step they are relative to. Of whole blocks: rows of the block sent before.
  int64_t total;      // Of whole blocks: how many rows they are, at most; exactly in the last section.
  uint64_t checksum;  // Of whole blocks: that of all rows, in the last section.
  int64_t is_last;
};
static_assert(sizeof(SectionHead) == 64);

struct PackedLayout {
  static constexpr size_t kHead = 16;
  explicit PackedLayout(const RecordLayout& layout)
      : payload_bytes(layout.weights_offset - kHeaderBytes + size_t{layout.dim} * row_type_bytes(layout.type)),
        stride((kHead + payload_bytes + 3) / 4 * 4) {}

  void pack(const std::byte* record, std::byte* to) const {
    RowHeader head;
    std::memcpy(&head, record, kHead);
    head.state &= kCountMask;
    std::memset(to + stride - 4, 0, 4);  // Padding is not left to chance.
    std::memcpy(to, &head, kHead);
    std::memcpy(to + kHead, record + kHeaderBytes, payload_bytes);
  }
  // All but the stamp.
  void unpack(const std::byte* from, std::byte* record) const {
    RowHeader head;
    std::memcpy(&head, from, kHead);
    RowHeader* to = header(record);
    to->id = head.id;
    to->last_step = head.last_step;
    set_state(to, kExists | (head.state & kCountMask));
    std::memcpy(record + kHeaderBytes, from + kHead, payload_bytes);
  }

  const size_t payload_bytes, stride;
};

// Writes sections into a buffer.
class SectionWriter {
 public:
  SectionWriter(std::byte* to, size_t capacity) : to_(to), capacity_(capacity) {}
  // Begin a section; false if there is no room for it and one item of `item_bytes`.
  bool open(const SectionHead& head, size_t item_bytes);
  bool has_room(size_t bytes) const { return used_ + bytes <= capacity_; }
  std::byte* take(size_t bytes) {
    std::byte* place = to_ + used_;
    used_ += bytes;
    return place;
  }
  SectionHead& head() { return *reinterpret_cast<SectionHead*>(to_ + opened_); }
  // An empty section is taken back unless it `is_needed`.
  void close(bool is_needed = false);
  size_t used() const { return used_; }
  int64_t num_sections() const { return num_sections_; }

 private:
  std::byte* to_;
  size_t capacity_, used_ = 0, opened_ = 0;
  int64_t num_sections_ = 0;
};

// What changed in blocks between the cut `since` and the younger `cut`: rows made or updated, with their values at
// `cut`, and ids deleted. Filled buffer by buffer; costs the rows written in between.
class ChangePack {
 public:
  using Key = std::pair<uint32_t, uint32_t>;
  // Throws std::invalid_argument unless both cuts are of one store, in this order, and one life of each block spans
  // them; `origin` goes into the sections' heads.
  ChangePack(Cut& cut, Cut& since, std::vector<Key> keys, int64_t origin);
  // The next sections; returns their bytes. Several exports of one cut wait for each other.
  size_t fill(std::byte* to, size_t capacity);
  bool is_done() const { return at_key_ == keys_.size(); }
  // Of the last fill.
  int64_t num_sections() const { return num_sections_; }
  // Rows and deleted ids so far.
  int64_t num_changes() const { return num_changes_; }
  // Of the keys, when done: the sum of hash(row at cut) - hash(row at since) over the changes, modulo 2^64.
  const std::vector<uint64_t>& checksum_deltas() const { return deltas_; }
  // An upper bound of what all sections take in one buffer.
  size_t bytes_max() const;

 private:
  using Change = ChangeIndex::Change;
  bool fill_key(SectionWriter* writer);
  bool pack_rows(SectionWriter* writer, CutReader* reader, const Change* changes, size_t count);
  bool pack_deleted(SectionWriter* writer, CutReader* reader, const Change* changes, size_t count);

  Cut& cut_;
  Cut& since_;
  const std::vector<Key> keys_;
  const int64_t origin_;
  std::shared_ptr<const ChangeIndex> index_;
  std::vector<std::pair<size_t, size_t>> ranges_;  // Of the index, by key.
  std::vector<uint64_t> deltas_;
  size_t at_key_ = 0, at_change_ = 0, at_deleted_ = 0;
  std::vector<int64_t> deleted_;  // Of the present key.
  bool is_deleted_known_ = false;
  int64_t num_sections_ = 0, num_changes_ = 0;
};

// All rows of one block, in the order of memory. `cut` null: of the live store, by the thread that may write to the
// block, until the next write.
class BlockPack {
 public:
  BlockPack(RowStore& store, Cut* cut, uint32_t table, uint32_t block);
  // One section with the next rows; returns its bytes, 0 if not one row fits.
  size_t fill(std::byte* to, size_t capacity);
  bool is_done() const { return is_done_; }
  int64_t num_rows() const { return num_rows_; }
  // Of the rows so far.
  uint64_t checksum() const { return checksum_; }

 private:
  RowStore& store_;
  Cut* cut_;
  const uint32_t table_, block_;
  std::vector<uint32_t> slots_;
  size_t at_ = 0;
  int64_t num_rows_ = 0;
  uint64_t checksum_ = 0;
  bool is_done_ = false;
};

}  // namespace shoal
