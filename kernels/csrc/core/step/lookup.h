// Lookup: one round of lookups of one batch over all tables. It owns every array between route and apply, so that
// several may be in flight; arrays keep their memory from step to step.
//
// Numbering. Positions (id occurrences) are numbered table by table, in each table feature by feature in plan order,
// in each feature as they lie in the batch. The unique rows of table t are numbered from the table's first position,
// in order of first occurrence: u in [position_start[t], position_start[t] + num_unique[t]). The number `num_positions`
// stands for a dropped id: a row of zeros that receives no gradient.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/step/plan.h"

namespace shoal::step {

// A batch as it comes: a KeyedJaggedTensor's arrays, read only.
struct BatchView {
  const void* values = nullptr;
  bool values_are_wide = true;  // int64, else int32
  int64_t num_values = 0;
  const void* offsets = nullptr;
  bool offsets_are_wide = true;
  int64_t num_columns = 0;  // keys; offsets has num_columns * batch_size + 1 entries
  const float* weights = nullptr;
  const int32_t* key_columns = nullptr;  // per feature of the plan: its column, or -1
  int64_t batch_size = 0;
};

// A run of rows of one table that one rank asks of another, in order of first occurrence.
struct Run {
  int table;
  int64_t start;  // index into the array that holds the runs' rows
  int64_t count;
};

// Runs grouped by peer: those of peer p are runs[peer_start[p] .. peer_start[p + 1]).
struct RunList {
  std::vector<Run> runs;
  std::vector<int64_t> peer_start;
  std::vector<int64_t> row_bytes, grad_bytes;  // per peer, on the wire
  // Per peer: partial sums, and gradients of bags, that go straight while rows go by way of a carrier. Of what this rank
  // asks for only; they are in addition to the above.
  std::vector<int64_t> sum_bytes, bag_grad_bytes;
};

// Which tables a section is about.
enum class Part { kAll, kRows, kPooled };

// Set in a row's address when the row is stored in its table's own (low-precision) type. Rows are 2-byte aligned.
constexpr uintptr_t kEncodedTag = 1;

// What one bag holds of one row block (bags.cpp), as the requester knows it.
struct BagUnit {
  uint32_t bag;
  uint32_t first, count;  // in Lookup::unit_positions_
  uint32_t number;        // among the units of the feature at its owner
  uint16_t owner;
  bool is_new_bag;        // the owner's first unit of the bag
  uint32_t kept;          // ids that the whole bag holds
};

struct BagCount {
  int64_t units = 0, positions = 0, bags = 0;
};

// What one rank told of the bags of one feature, as the owner of their rows knows it.
struct BagPart {
  int64_t run;
  int feature;
  int64_t units, positions, bags;
  const uint32_t* lengths;
  const uint32_t* inverse;
  const uint32_t* weights;  // float32 bits, or null
  const uint32_t* kept;     // or null
  std::vector<uint32_t> begins;  // [units + 1]
};

struct RouteStatus {
  int status = 0;  // 0: fine, 1: an id outside its table under policy ERROR
  int bad_feature = -1;
  int64_t bad_value = 0;
  int64_t bad_position = -1;  // index into the batch's values
};

class Lookup {
 public:
  explicit Lookup(StepPlan* plan);

  // Deduplicates the ids of all tables and orders the unique ones by (owner, table, first occurrence).
  RouteStatus route(const BatchView& batch, bool is_training);
  // Bytes of the ids section for each peer; 0 for this rank itself. Where a carrier brings rows (StepPlan::is_far) it is
  // without the pooled tables, whose section is the straight one; elsewhere that has 0 bytes.
  void id_bytes(int64_t* bytes) const;
  void straight_id_bytes(int64_t* bytes) const;
  // Here and below a destination of 0 leaves a peer out: its part goes into another exchange, by a call of its own.
  void write_ids(const int64_t* destinations) const;
  void write_straight_ids(const int64_t* destinations) const;
  // Owner: reads the sections of all peers (validated), finds or reserves the rows. Also resolves local rows.
  // `straight` and its bytes may be null where there are no such sections.
  void resolve(const int64_t* sources, const int64_t* source_bytes, const int64_t* straight,
               const int64_t* straight_bytes);
  const std::vector<int64_t>& row_bytes_out() const { return incoming_.row_bytes; }
  const std::vector<int64_t>& row_bytes_in() const { return outgoing_.row_bytes; }
  const std::vector<int64_t>& grad_bytes_out() const { return outgoing_.grad_bytes; }
  const std::vector<int64_t>& grad_bytes_in() const { return incoming_.grad_bytes; }
  // Of what goes straight: partial sums to receive after the rows of each peer, gradients of bags to send after those of
  // rows. 0 where a peer's rows go straight, too.
  const std::vector<int64_t>& sum_bytes_in() const { return outgoing_.sum_bytes; }
  const std::vector<int64_t>& bag_grad_bytes_out() const { return outgoing_.bag_grad_bytes; }
  // Owner: writes the asked rows of each peer in wire format.
  void write_rows(const int64_t* destinations) const;
  // Requester: pools the rows (received at `sources`, or local) into the output tensors. Partial sums follow the rows of
  // their peer, or lie at `sums`.
  void pool(const int64_t* sources, const int64_t* sums, float* const* outputs);
  // Requester: writes the sum of the gradients of each unique row for each peer; sums of local rows are made in apply.
  void segment_sum(const float* const* grads, const int64_t* destinations);
  // Writes the same sums for further peers.
  void write_sums(const int64_t* destinations) const;
  // Writes the gradients of bags that go straight.
  void write_straight_grads(const int64_t* destinations) const;
  // Gradient of per-sample weights, added into out [num_values] (the caller zeroes it).
  void weight_grad(const float* const* grads, float* out);

  // Statistics of the last route and resolve. Column blocks of one table count once, but in table_loads.
  int64_t num_positions() const;
  int64_t num_unique() const;
  int64_t num_dropped() const { return sum_over_ids(dropped_); }
  int64_t num_remapped() const { return sum_over_ids(remapped_); }
  const std::vector<int64_t>& feature_counts() const { return feature_count_; }
  const std::vector<int64_t>& dropped() const { return dropped_; }
  const std::vector<int64_t>& remapped() const { return remapped_; }
  void table_loads(int64_t* unique_asked, int64_t* rows_served) const;
  // Per table [tables][4]: unique rows, ids that were kept, and the partial sums that the pooled flow takes for them: one
  // per bag and row block, or one per bag and owner. One pass over the positions.
  void flow_counts(int64_t* out) const;
  int64_t nbytes() const;

 private:
  friend class Updater;

  // route.cpp
  template <class Value, class Offset>
  RouteStatus route_typed(const BatchView& batch);
  template <class Offset>
  void place_positions(const BatchView& batch);
  template <class Value, class Offset>
  void dedup_table(const BatchView& batch, int table, int64_t* bad_index);
  void copy_leader(int table);
  int64_t sum_over_ids(const std::vector<int64_t>& per_feature) const;
  void order_by_owner();
  // bags.cpp
  template <class Fn>
  void for_bag_features(const RunList& list, int peer, Fn&& fn) const {
    for (int64_t r = list.peer_start[peer]; r < list.peer_start[peer + 1]; ++r) {
      const Table& table = plan_->tables[list.runs[r].table];
      if (!table.is_pooled) continue;
      for (int f : table.features) fn(list.runs[r], table, f);
    }
  }
  int64_t rows_bytes_in(int peer) const;
  std::vector<Run> runs_to(int peer, Part part) const;
  void write_runs(const std::vector<Run>& runs, std::byte** out) const;
  int64_t read_runs(int peer, Part part, const std::byte* section, int64_t bytes, int64_t first_row, int64_t* end);
  void cut_bags();
  void write_bags(int peer, uint32_t* out) const;
  void read_bags(int peer, const std::byte* data, int64_t bytes);
  void write_partial_sums(int peer, std::byte* out) const;
  void add_partial_sums(std::vector<const std::byte*> sources, float* const* outputs) const;
  void write_bag_grads(int peer, std::byte* out) const;
  void scatter_bag_grads(int peer, const std::byte* grads);
  // rows.cpp
  void find_slots();
  void point_at_local_rows();
  void round_local_rows();
  void point_at_mirrored_rows();
  void point_at_remote_rows(const int64_t* sources);
  // pooling.cpp
  template <class Fn>
  void with_rows(int table, Fn&& fn) const;
  void pool_block(int output, int64_t begin, int64_t end, float* out) const;
  // segments.cpp
  void sort_positions();
  void sort_table(int table);
  void sum_hot_rows();
  void sum_range(int table, int64_t begin, int64_t end, float* sum) const;
  const float* grad_of(int table, uint32_t entry) const;
  int64_t begin_of(int table, int64_t u) const { return u == position_start_[table] ? u : ends_[u - 1]; }
  int64_t look_ahead_end(int table) const;
  void prefetch_row_grad(int table, int64_t u) const;
  // The gradient of unique row u: in `space` [dim], or where it already lies.
  const float* sum_row(int table, int64_t u, float* space) const;

  StepPlan* plan_;
  bool is_training_ = true;
  int64_t batch_size_ = 0;
  int64_t num_values_ = 0;
  const float* weights_ = nullptr;  // the batch's; the caller keeps them alive

  // Positions.
  int64_t num_positions_ = 0;
  std::vector<int64_t> position_start_;  // [tables + 1]
  std::vector<int64_t> feature_start_;   // [features] first position
  std::vector<int64_t> feature_count_;   // [features]
  std::vector<int64_t> value_start_;     // [features] first index in the batch's values
  std::vector<int64_t> dropped_, remapped_;  // [features] ids dropped; ids replaced (hash, oov)
  Buffer<uint32_t> bag_offsets_;         // [features][batch + 1] positions, absolute
  Buffer<uint32_t> inverse_;             // [positions] -> unique row, or num_positions

  // Unique rows; indices are sparse, see above.
  int64_t num_unique_total_ = 0;
  std::vector<int64_t> num_unique_;  // [tables]
  Buffer<uint64_t> unique_ids_;
  Buffer<uint16_t> unique_owner_;    // only when a table has several owners
  Buffer<uint32_t> unique_count_;    // occurrences
  Buffer<uintptr_t> row_address_;    // bit 0 set: stored in the table's dtype, else float32

  // Rows we ask of peers (and of ourselves): outgoing_.runs index `order_`, which holds unique numbers.
  RunList outgoing_;
  Buffer<uint32_t> order_;
  std::vector<int64_t> order_start_;  // [world + 1]

  // Rows that peers (and we) ask of us.
  RunList incoming_;
  std::vector<const std::byte*> incoming_data_;  // per run: its ids in the received section
  std::vector<int64_t> table_runs_;              // [tables + 1]
  std::vector<const int64_t*> incoming_run_ids_;  // per run; this rank's own may lie in unique_ids_
  Buffer<int64_t> incoming_ids_;
  Buffer<uint32_t> incoming_slots_;
  Buffer<float> initial_rows_;  // values of local rows that do not exist (evaluation)
  Buffer<float> kept_rows_;     // remote rows that are decoded, or of weighted tables, for weight_grad
  Buffer<float> rounded_rows_;  // local rows as the codec of their table gives them

  // The pooled flow (bags.cpp). This rank is a peer of its own.
  std::vector<BagUnit> units_;                              // by feature, bag, row block
  std::vector<std::pair<int64_t, int64_t>> feature_units_;  // [features] begin and end in units_
  std::vector<BagCount> bag_counts_;                        // [features][world]
  std::vector<int64_t> bag_words_;                          // [world] uint32s told to each owner
  Buffer<uint32_t> place_;                                  // unique row -> its number in its run
  Buffer<uint32_t> unit_positions_;                         // positions, by unit
  std::vector<std::vector<uint32_t>> bag_sections_;         // [world] what was received
  std::vector<std::vector<BagPart>> bag_parts_;             // [world]
  std::vector<std::vector<float>> run_sums_;                // [incoming runs] summed gradients
  Buffer<float> decoded_grads_;
  Buffer<std::byte> own_sums_, own_grads_;                  // messages of this rank to itself

  // Backward: positions sorted by unique row. ends_[u] is the end of row u's entries, its begin is ends_[u - 1].
  Buffer<uint32_t> ends_;
  Buffer<uint32_t> entries_;   // (feature in table) << shift | row of the gradient tensor
  Buffer<float> scales_;       // per entry, only in tables with scaled features
  std::vector<int> shift_;     // [tables]
  // Rows summed ahead by several threads, ascending.
  struct HotRow {
    uint32_t number;
    int64_t sum_offset;
  };
  std::vector<HotRow> hot_rows_;
  Buffer<float> hot_sums_;
  std::vector<const float*> grads_;  // [outputs]; the caller keeps them alive until apply
  bool has_grads_ = false;
};

}  // namespace shoal::step
