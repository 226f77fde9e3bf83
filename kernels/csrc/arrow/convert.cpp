#include "arrow/convert.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "arrow/ids.h"

namespace shoal {

namespace {

const char* const kIdTypes =
    "it must hold integers or strings, one a row or in lists (floating ids are refused: 2**53 + 1 does not survive "
    "them)";

// Counts a failure and keeps the first few of a column.
class FailureLog {
 public:
  FailureLog(int column, int64_t failures_max, BatchArrays* out) : column_(column), left_(failures_max), out_(out) {}

  void add(FailureKind kind, int64_t row, double value = 0, int64_t expected = 0) {
    ++count(static_cast<Counter>(kFirstFailure + static_cast<int>(kind)));
    if (left_-- > 0) out_->failures.push_back({column_, kind, row, value, expected});
  }
  int64_t& count(Counter counter) { return out_->counts[static_cast<size_t>(column_ * kNumCounters + counter)]; }

 private:
  int column_;
  int64_t left_;
  BatchArrays* out_;
};

// Appends the rows of one sparse feature, chunk after chunk.
class FeatureWriter {
 public:
  FeatureWriter(const ColumnSpec& spec, bool is_weighted, int64_t* row_offsets, BatchArrays* out, FailureLog* log)
      : spec_(spec), is_weighted_(is_weighted), row_offsets_(row_offsets), out_(out), log_(log) {}

  void append(const ColumnView& ids, const ColumnView* weights) {
    if (ids.num_rows == 0) return;
    const int64_t begin = ids.begin(0), end = ids.end(ids.num_rows - 1);
    const IdReader reader(ids, end - begin);
    const bool is_plain = !ids.may_have_null_rows() && !reader.may_have_nulls() &&
                          (weights == nullptr || is_clean(*weights));
    if (is_plain && lengths_fit(ids, weights)) {
      append_plain(ids, reader, weights, begin, end);
    } else {
      append_rows(ids, reader, weights);
    }
    row_ += ids.num_rows;
  }

 private:
  static bool is_clean(const ColumnView& weights) {
    return !weights.may_have_null_rows() && !weights.elements.may_have_nulls();
  }

  // Whether no list is too long and every row has as many weights as ids.
  bool lengths_fit(const ColumnView& ids, const ColumnView* weights) const {
    if (spec_.max_length < 0 && weights == nullptr) return true;
    bool fits = true;
    for (int64_t row = 0; row < ids.num_rows; ++row) {
      const int64_t length = ids.end(row) - ids.begin(row);
      fits &= spec_.max_length < 0 || length <= spec_.max_length;
      fits &= weights == nullptr || weights->end(row) - weights->begin(row) == length;
    }
    return fits;
  }

  void append_plain(const ColumnView& ids, const IdReader& reader, const ColumnView* weights, int64_t begin,
                    int64_t end) {
    int64_t cursor = out_->num_values;
    reader.copy(begin, end, out_->values.data() + cursor);
    int64_t* offsets = row_offsets_ + row_;
    if (ids.type.container == Container::kScalar) {
      for (int64_t row = 0; row < ids.num_rows; ++row) offsets[row] = cursor + row + 1;
    } else {
      for (int64_t row = 0; row < ids.num_rows; ++row) offsets[row] = cursor + ids.end(row) - begin;
    }
    if (weights != nullptr) {
      for (int64_t row = 0; row < ids.num_rows; ++row) {
        for (int64_t i = weights->begin(row); i < weights->end(row); ++i) write_weight(*weights, i, row, cursor++);
      }
    } else if (is_weighted_) {
      float* to = out_->weights.data();
      for (int64_t i = begin; i < end; ++i) to[cursor++] = 1.0f;
    }
    out_->num_values += end - begin;
  }

  void append_rows(const ColumnView& ids, const IdReader& reader, const ColumnView* weights) {
    for (int64_t row = 0; row < ids.num_rows; ++row) {
      append_row(ids, reader, weights, row);
      row_offsets_[row_ + row] = out_->num_values;
    }
  }

  void append_row(const ColumnView& ids, const IdReader& reader, const ColumnView* weights, int64_t row) {
    if (!ids.row_is_valid(row)) {
      if (resolve_null(row)) push(spec_.oov_id, nullptr, 0, row);
      return;
    }
    const int64_t begin = ids.begin(row), end = ids.end(row);
    int64_t first_weight = 0;
    if (weights != nullptr) {
      const bool is_present = weights->row_is_valid(row);
      const int64_t length = is_present ? weights->end(row) - weights->begin(row) : 0;
      first_weight = weights->begin(row);
      if (length != end - begin) {
        log_->add(FailureKind::kWeightLength, row_ + row, static_cast<double>(length), end - begin);
        weights = nullptr;
      }
    }
    int64_t kept = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (spec_.max_length >= 0 && kept == spec_.max_length) {
        log_->count(kTruncated) += end - i;
        return;
      }
      const bool is_valid = reader.is_valid(i);
      if (!is_valid && !resolve_null(row)) continue;
      push(is_valid ? reader.read(i) : spec_.oov_id, weights, first_weight + (i - begin), row);
      ++kept;
    }
  }

  // True if the null becomes the OOV id, false if it leaves nothing.
  bool resolve_null(int64_t row) {
    ++log_->count(kNulls);
    if (spec_.null_policy == NullPolicy::kError) log_->add(FailureKind::kNullId, row_ + row);
    return spec_.null_policy == NullPolicy::kOov;
  }

  void push(int64_t id, const ColumnView* weights, int64_t weight_at, int64_t row) {
    const int64_t at = out_->num_values++;
    out_->values.data()[at] = id;
    if (weights != nullptr) {
      write_weight(*weights, weight_at, row, at);
    } else if (is_weighted_) {
      out_->weights.data()[at] = 1.0f;
    }
  }

  void write_weight(const ColumnView& weights, int64_t i, int64_t row, int64_t at) {
    float weight = NAN;
    if (weights.elements.is_valid(i)) weight = static_cast<float>(read_number(weights.elements, i));
    if (!std::isfinite(weight)) log_->add(FailureKind::kBadWeight, row_ + row, weight);
    out_->weights.data()[at] = weight;
  }

  const ColumnSpec& spec_;
  bool is_weighted_;
  int64_t* row_offsets_;  // Where the end of row 0 goes.
  BatchArrays* out_;
  FailureLog* log_;
  int64_t row_ = 0;  // First row of the current chunk.
};

template <class T>
void copy_numbers(const void* values, int64_t first, int64_t n, float* target, int64_t stride) {
  const T* in = static_cast<const T*>(values) + first;
  for (int64_t row = 0; row < n; ++row) target[row * stride] = static_cast<float>(in[row]);
}

// Every row as float; a null as NaN.
void read_numbers(const ColumnView& view, float* target, int64_t stride) {
  const ElementView& elements = view.elements;
  if (view.may_have_null_rows()) {
    for (int64_t row = 0; row < view.num_rows; ++row) {
      const bool is_valid = view.row_is_valid(row);
      target[row * stride] = is_valid ? static_cast<float>(read_number(elements, view.first_row + row)) : NAN;
    }
    return;
  }
  switch (elements.element) {
    case Element::kFloat32: return copy_numbers<float>(elements.values, view.first_row, view.num_rows, target, stride);
    case Element::kFloat64: return copy_numbers<double>(elements.values, view.first_row, view.num_rows, target, stride);
    case Element::kInt32: return copy_numbers<int32_t>(elements.values, view.first_row, view.num_rows, target, stride);
    case Element::kInt64: return copy_numbers<int64_t>(elements.values, view.first_row, view.num_rows, target, stride);
    default:
      for (int64_t row = 0; row < view.num_rows; ++row) {
        target[row * stride] = static_cast<float>(read_number(elements, view.first_row + row));
      }
  }
}

int64_t count_rows(const std::vector<Chunk>& chunks) {
  int64_t rows = 0;
  for (const Chunk& chunk : chunks) rows += chunk.num_rows;
  return rows;
}

ColumnView view_child(const Chunk& chunk, int64_t child, const ColumnType& type) {
  return view_column(type, *chunk.batch->children[child], chunk.batch->offset + chunk.start, chunk.num_rows);
}

// The problem of a sparse or extra column's type, or an empty string.
std::string id_type_problem(const ColumnSpec& spec, const ColumnType& type) {
  const bool is_null = type.element == Element::kNull;
  const bool is_scalar = type.container == Container::kScalar;
  const bool is_id = is_integer(type.element) || is_bytes(type.element) || type.element == Element::kBool;
  if (!is_null && !is_id) return kIdTypes;
  if (spec.role == Role::kExtra) return is_scalar ? "" : "it must hold one integer or string a row, not lists";
  switch (spec.kind) {
    case IdKind::kId:
      return is_scalar && !is_bytes(type.element) ? "" : "kind is id, so it must hold one integer a row";
    case IdKind::kList:
      if ((!is_scalar || is_null) && !is_bytes(type.element)) return "";
      return "kind is list, so it must hold lists of integers";
    case IdKind::kString:
      return is_bytes(type.element) || is_null ? "" : "kind is string, so it must hold strings or binaries";
    default:
      return "";
  }
}

}  // namespace

BatchArrays::BatchArrays(int64_t rows, int64_t num_features, int64_t capacity, bool is_weighted, int64_t num_dense,
                         bool has_sample_weights, int64_t num_extras, int64_t num_specs)
    : num_rows(rows),
      values(static_cast<size_t>(capacity)),
      offsets(static_cast<size_t>(num_features * rows + 1)),
      weights(static_cast<size_t>(is_weighted ? capacity : 0)),
      dense(static_cast<size_t>(rows * num_dense)),
      labels(static_cast<size_t>(rows)),
      sample_weights(static_cast<size_t>(has_sample_weights ? rows : 0)),
      extras(static_cast<size_t>(num_extras * rows)),
      counts(static_cast<size_t>(num_specs * kNumCounters), 0) {}

Converter::Converter(std::vector<ColumnSpec> specs, ConverterOptions options)
    : specs_(std::move(specs)), options_(options) {
  for (const ColumnSpec& spec : specs_) {
    num_features_ += spec.role == Role::kSparse;
    num_dense_ += spec.role == Role::kDense;
    num_extras_ += spec.role == Role::kExtra;
    has_sample_weights_ |= spec.role == Role::kWeight;
    is_weighted_ |= !spec.weights.empty();
  }
}

std::string Converter::find(const ArrowSchema& schema, const std::string& name, int64_t* child,
                            ColumnType* type) const {
  *child = -1;
  for (int64_t i = 0; i < schema.n_children; ++i) {
    if (name != schema.children[i]->name) continue;
    if (*child >= 0) return "the data has two columns of this name";
    *child = i;
  }
  if (*child < 0) return "the data has no such column";
  return parse_type(*schema.children[*child], type) ? "" : "its type is not one that Shoal reads";
}

std::vector<std::pair<int, std::string>> Converter::bind(const ArrowSchema& schema) {
  std::vector<std::pair<int, std::string>> problems;
  columns_.assign(specs_.size(), Bound());
  bound_ = false;
  for (size_t s = 0; s < specs_.size(); ++s) {
    const ColumnSpec& spec = specs_[s];
    Bound& column = columns_[s];
    std::string problem = find(schema, spec.name, &column.child, &column.type);
    const ColumnType& type = column.type;
    if (problem.empty()) {
      if (spec.role == Role::kSparse || spec.role == Role::kExtra) {
        problem = id_type_problem(spec, type);
      } else if (type.container != Container::kScalar || type.has_dictionary ||
                 !(is_number(type.element) || type.element == Element::kNull)) {
        problem = "it must hold one number or boolean a row";
      }
    }
    if (problem.empty() && !spec.weights.empty()) {
      const ColumnType& weights = column.weights_type;
      problem = find(schema, spec.weights, &column.weights_child, &column.weights_type);
      const bool fits = !weights.has_dictionary && (is_number(weights.element) || weights.element == Element::kNull) &&
                        (weights.container == Container::kScalar) == (type.container == Container::kScalar);
      if (problem.empty() && !fits) problem = "it must hold numbers in the same shape as the ids: one a row, or lists";
      if (!problem.empty()) problem = "weights column '" + spec.weights + "': " + problem;
    }
    if (!problem.empty()) problems.emplace_back(static_cast<int>(s), problem);
  }
  bound_ = problems.empty();
  return problems;
}

int64_t Converter::count_capacity(const std::vector<Chunk>& chunks) const {
  int64_t capacity = 0;
  for (size_t s = 0; s < specs_.size(); ++s) {
    if (specs_[s].role != Role::kSparse) continue;
    const ColumnType& type = columns_[s].type;
    for (const Chunk& chunk : chunks) {
      if (chunk.num_rows == 0) continue;
      if (type.container == Container::kScalar) {
        capacity += chunk.num_rows;
        continue;
      }
      const ColumnView view = view_child(chunk, columns_[s].child, type);
      capacity += view.end(view.num_rows - 1) - view.begin(0);
      // A null list, whatever range it covers, may become one OOV id.
      if (view.may_have_null_rows()) capacity += view.num_rows;
    }
  }
  return capacity;
}

std::unique_ptr<BatchArrays> Converter::convert(const std::vector<Chunk>& chunks) const {
  if (!bound_) throw std::logic_error("convert() before a successful bind()");
  const int64_t rows = count_rows(chunks);
  auto out = std::make_unique<BatchArrays>(rows, num_features_, count_capacity(chunks), is_weighted_, num_dense_,
                                           has_sample_weights_, num_extras_, num_specs());
  out->offsets.data()[0] = 0;
  int64_t feature = 0, dense = 0, extra = 0;
  for (int s = 0; s < static_cast<int>(specs_.size()); ++s) {
    switch (specs_[static_cast<size_t>(s)].role) {
      case Role::kSparse: fill_feature(s, feature++, chunks, out.get()); break;
      case Role::kDense: fill_numbers(s, out->dense.data() + dense++, num_dense_, chunks, out.get()); break;
      case Role::kLabel: fill_numbers(s, out->labels.data(), 1, chunks, out.get()); break;
      case Role::kWeight: fill_numbers(s, out->sample_weights.data(), 1, chunks, out.get()); break;
      case Role::kExtra: fill_extra(s, out->extras.data() + rows * extra++, chunks, out.get()); break;
    }
  }
  return out;
}

void Converter::fill_feature(int spec, int64_t feature, const std::vector<Chunk>& chunks, BatchArrays* out) const {
  const Bound& column = columns_[static_cast<size_t>(spec)];
  FailureLog log(spec, options_.failures_max, out);
  int64_t* row_offsets = out->offsets.data() + feature * out->num_rows + 1;
  FeatureWriter writer(specs_[static_cast<size_t>(spec)], is_weighted_, row_offsets, out, &log);
  for (const Chunk& chunk : chunks) {
    const ColumnView ids = view_child(chunk, column.child, column.type);
    if (column.weights_child < 0) {
      writer.append(ids, nullptr);
      continue;
    }
    const ColumnView weights = view_child(chunk, column.weights_child, column.weights_type);
    writer.append(ids, &weights);
  }
}

void Converter::fill_numbers(int spec, float* target, int64_t stride, const std::vector<Chunk>& chunks,
                             BatchArrays* out) const {
  const Bound& column = columns_[static_cast<size_t>(spec)];
  const Role role = specs_[static_cast<size_t>(spec)].role;
  FailureLog log(spec, options_.failures_max, out);
  int64_t first = 0;
  for (const Chunk& chunk : chunks) {
    const ColumnView view = view_child(chunk, column.child, column.type);
    float* rows = target + first * stride;
    read_numbers(view, rows, stride);
    for (int64_t row = 0; row < view.num_rows; ++row) {
      float& value = rows[row * stride];
      if (role == Role::kDense) {
        if (std::isfinite(value)) continue;
        ++log.count(kNulls);
        if (!options_.missing_dense_is_zero) log.add(FailureKind::kBadDense, first + row, value);
        value = 0.0f;
      } else if (role == Role::kLabel) {
        const bool is_good = options_.labels_are_binary ? value == 0.0f || value == 1.0f : std::isfinite(value);
        if (is_good) continue;
        const bool is_null = !view.row_is_valid(row);
        log.add(is_null ? FailureKind::kNullLabel : FailureKind::kBadLabel, first + row, value);
      } else if (!(std::isfinite(value) && value >= 0.0f)) {
        log.add(FailureKind::kBadSampleWeight, first + row, value);
      }
    }
    first += view.num_rows;
  }
}

void Converter::fill_extra(int spec, int64_t* target, const std::vector<Chunk>& chunks, BatchArrays* out) const {
  const Bound& column = columns_[static_cast<size_t>(spec)];
  FailureLog log(spec, options_.failures_max, out);
  int64_t first = 0;
  for (const Chunk& chunk : chunks) {
    const ColumnView view = view_child(chunk, column.child, column.type);
    const IdReader reader(view, view.num_rows);
    for (int64_t row = 0; row < view.num_rows; ++row) {
      const int64_t at = view.first_row + row;
      const bool is_valid = view.row_is_valid(row) && reader.is_valid(at);
      if (!is_valid) log.add(FailureKind::kNullExtra, first + row);
      target[first + row] = is_valid ? reader.read(at) : 0;
    }
    first += view.num_rows;
  }
}

}  // namespace shoal
