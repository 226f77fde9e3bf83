// StepPlan: what the kernels of a step must know about all tables, features and the placement, built once per view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/step/codec.h"
#include "core/step/threads.h"
#include "core/store/hash.h"
#include "core/store/rowstore.h"

namespace shoal::step {

constexpr int kDimMax = 4096;

enum class Pooling : int { kSum = 0, kMean = 1, kNone = 2 };
enum class IdPolicy : int { kError = 0, kHash = 1, kOov = 2, kDrop = 3 };

// A peer sent something that cannot be true; becomes ProtocolError in Python.
struct ProtocolViolation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Table {
  int dim = 0;
  RowType type = RowType::F32;
  uint64_t num_embeddings = 0;  // 0: dynamic, any 64-bit id
  uint32_t log2_blocks = 0;
  std::vector<uint16_t> owners;  // block -> rank
  bool has_one_owner = false;    // all blocks on owners[0]
  bool is_wide = false;          // ids travel as int64
  bool has_scaled_features = false;  // MEAN or weighted: gradients are multiplied per position
  bool has_weighted_features = false;
  bool is_mirrored = false;          // every rank keeps its values (mirrors.h): they are not asked for
  Codec values_codec = Codec::kFp32, grads_codec = Codec::kFp32;
  int64_t wire_row_bytes = 0;        // of values; 0 where mirrored
  int64_t wire_grad_bytes = 0;
  // A column block other than the first of its table: the first one. Both have the same features over the same ids, which
  // are de-duplicated once; else -1.
  int leader = -1;
  // The pooled flow (bags.cpp): partial sums of bags and gradients of bags travel, no rows: wire_row_bytes and
  // wire_grad_bytes are 0.
  bool is_pooled = false;
  bool sums_by_owner = false;  // a partial sum is of an owner's rows, not of a row block's
  int64_t unit_bytes = 0, bag_grad_bytes = 0;
  bool shares_statistic = false;  // its update needs the sums of squares of the table's other column blocks
  std::vector<int> features;  // in plan order: positions of a table are numbered in this order

  int owner_of(uint64_t mixed_id) const {
    if (has_one_owner) return owners[0];
    return owners[block_of_hash(mixed_id, log2_blocks)];
  }
  // Whether values differ from the stored rows. Then this rank's own rows are rounded too: placement changes no bits (S5).
  bool rounds_values() const {
    return !is_pooled && values_codec != Codec::kFp32 && !(values_codec == Codec::kFp16 && type == RowType::F16) &&
           !(values_codec == Codec::kBf16 && type == RowType::BF16);
  }
  bool rounds_grads() const { return grads_codec != Codec::kFp32; }
  // The largest valid id: ids above it, read as unsigned, are outside the table.
  uint64_t last_id() const { return num_embeddings ? num_embeddings - 1 : ~uint64_t{0}; }
};

struct Feature {
  int table = 0;
  Pooling pooling = Pooling::kSum;
  bool is_weighted = false;
  IdPolicy policy = IdPolicy::kError;
  int index_in_table = 0;  // position in Table::features
  int output = 0;          // which output tensor: one per pooled collection, one per sequence feature
  int64_t column = 0;      // first column in that tensor, in floats
  bool is_sequence() const { return pooling == Pooling::kNone; }
  bool is_scaled() const { return is_weighted || pooling == Pooling::kMean; }
};

class Mirrors;

struct StepPlan {
  RowStore* store = nullptr;
  std::vector<Table> tables;
  std::vector<Feature> features;
  std::vector<int64_t> output_strides;      // floats per row of each output tensor
  std::vector<std::vector<int>> pooled;     // pooled features of each output, in column order (empty: a sequence)
  bool has_column_blocks = false;
  bool has_pooled_flow = false;
  int rank = 0;
  int world_size = 1;
  std::unique_ptr<Threads> threads;
  // Number of each rank's host, hosts numbered by their lowest rank, where gradients are summed per host first (relay.h);
  // else empty.
  std::vector<int> hosts;

  std::shared_ptr<Mirrors> mirrors;  // null where no table is mirrored

  // Whether rows of rank `peer` come by way of a carrier; partial sums and what they need go straight all the same.
  bool is_far(int peer) const { return !hosts.empty() && hosts[peer] != hosts[rank]; }

  int num_tables() const { return static_cast<int>(tables.size()); }
  int num_features() const { return static_cast<int>(features.size()); }
  int num_outputs() const { return static_cast<int>(output_strides.size()); }
};

// A grow-only array whose elements are not initialised.
template <class T>
class Buffer {
 public:
  T* grow(size_t n) {
    if (n > capacity_) {
      capacity_ = n + n / 4 + 16;
      data_.reset(static_cast<T*>(::operator new(capacity_ * sizeof(T), std::align_val_t{64})));
    }
    return data_.get();
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }
  int64_t nbytes() const { return static_cast<int64_t>(capacity_ * sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
  size_t capacity_ = 0;
};

}  // namespace shoal::step
