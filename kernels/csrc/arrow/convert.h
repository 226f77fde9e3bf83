// Arrow record batches -> the arrays of a training batch, all columns in one call, each value copied once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrow/buffers.h"
#include "arrow/column.h"

namespace shoal {

enum class FailureKind : int32_t {
  kNullId = 0,        // A null id or list and the policy is `error`.
  kWeightLength = 1,  // A row has not as many weights as ids; value = weights, expected = ids.
  kBadWeight = 2,     // A null or non-finite weight of an id.
  kNullLabel = 3,
  kBadLabel = 4,
  kBadDense = 5,         // Null, NaN or infinite and the policy is `error`.
  kBadSampleWeight = 6,  // Null, negative or not finite.
  kNullExtra = 7,
};

// A value the schema does not allow.
struct Failure {
  int32_t column;  // Index into the specs.
  FailureKind kind;
  int64_t row;  // Of the batch.
  double value;
  int64_t expected;
};

// Per spec: how often a policy was applied, then how often each kind of failure occurred.
enum Counter { kNulls = 0, kTruncated = 1, kFirstFailure = 2, kNumCounters = 10 };

struct BatchArrays {
  BatchArrays(int64_t num_rows, int64_t num_features, int64_t capacity, bool is_weighted, int64_t num_dense,
              bool has_sample_weights, int64_t num_extras, int64_t num_specs);

  int64_t num_rows;
  int64_t num_values = 0;
  Buffer<int64_t> values;          // [num_values], feature after feature.
  Buffer<int64_t> offsets;         // [features * rows + 1]
  Buffer<float> weights;           // [num_values] where the features are weighted.
  Buffer<float> dense;             // [rows, num_dense]
  Buffer<float> labels;            // [rows]
  Buffer<float> sample_weights;    // [rows] where the schema has them.
  Buffer<int64_t> extras;          // [num_extras, rows]
  std::vector<int64_t> counts;     // [specs, kNumCounters]
  std::vector<Failure> failures;   // The first few of each column.
};

struct ConverterOptions {
  bool labels_are_binary = true;
  bool missing_dense_is_zero = false;
  int64_t failures_max = 1;  // Kept per column; all are counted.
};

// Rows [start, start + num_rows) of a record batch.
struct Chunk {
  const ArrowArray* batch;
  int64_t start;
  int64_t num_rows;
};

class Converter {
 public:
  Converter(std::vector<ColumnSpec> specs, ConverterOptions options);

  // Finds the columns in `schema` and checks their types. Returns (spec, sentence) per problem; empty means bound.
  std::vector<std::pair<int, std::string>> bind(const ArrowSchema& schema);

  // Converts the rows of the chunks, in order, as one batch. They must have the bound schema.
  std::unique_ptr<BatchArrays> convert(const std::vector<Chunk>& chunks) const;

  bool is_bound() const { return bound_; }
  bool is_weighted() const { return is_weighted_; }
  bool has_sample_weights() const { return has_sample_weights_; }
  int64_t num_features() const { return num_features_; }
  int64_t num_dense() const { return num_dense_; }
  int64_t num_extras() const { return num_extras_; }
  int64_t num_specs() const { return static_cast<int64_t>(specs_.size()); }

 private:
  struct Bound {
    int64_t child = -1;
    ColumnType type;
    int64_t weights_child = -1;
    ColumnType weights_type;
  };

  std::string find(const ArrowSchema& schema, const std::string& name, int64_t* child, ColumnType* type) const;
  int64_t count_capacity(const std::vector<Chunk>& chunks) const;
  void fill_feature(int spec, int64_t feature, const std::vector<Chunk>& chunks, BatchArrays* out) const;
  void fill_numbers(int spec, float* target, int64_t stride, const std::vector<Chunk>& chunks,
                    BatchArrays* out) const;
  void fill_extra(int spec, int64_t* target, const std::vector<Chunk>& chunks, BatchArrays* out) const;

  std::vector<ColumnSpec> specs_;
  ConverterOptions options_;
  std::vector<Bound> columns_;
  bool bound_ = false;
  bool is_weighted_ = false;
  bool has_sample_weights_ = false;
  int64_t num_features_ = 0;
  int64_t num_dense_ = 0;
  int64_t num_extras_ = 0;
};

}  // namespace shoal
