// What a column of the declared schema is, what type it has in the data, and views that read it in place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arrow/abi.h"
#include "arrow/xxh64.h"

namespace shoal {

enum class Role : uint8_t { kLabel = 0, kWeight = 1, kDense = 2, kSparse = 3, kExtra = 4 };
enum class IdKind : uint8_t { kAuto = 0, kId = 1, kList = 2, kString = 3 };
enum class NullPolicy : uint8_t { kDrop = 0, kOov = 1, kError = 2 };

// A column the user declared.
struct ColumnSpec {
  std::string name;
  Role role = Role::kDense;
  IdKind kind = IdKind::kAuto;
  std::string weights;      // Name of its weights column, or empty.
  int64_t max_length = -1;  // < 0: no limit.
  NullPolicy null_policy = NullPolicy::kDrop;
  int64_t oov_id = -1;
};

enum class Element : uint8_t {
  kInt8, kInt16, kInt32, kInt64, kUint8, kUint16, kUint32, kUint64, kBool,
  kFloat16, kFloat32, kFloat64, kBytes32, kBytes64, kNull,
};
enum class Container : uint8_t { kScalar, kList, kLargeList, kFixedList };

inline bool is_integer(Element e) { return e <= Element::kUint64; }
inline bool is_bytes(Element e) { return e == Element::kBytes32 || e == Element::kBytes64; }
inline bool is_number(Element e) { return e <= Element::kFloat64; }

// The type of a column in the data. With a dictionary, `element` is the type of its values and `index` of its keys.
struct ColumnType {
  Container container = Container::kScalar;
  int64_t list_size = 1;  // kFixedList only.
  Element element = Element::kNull;
  bool has_dictionary = false;
  Element index = Element::kInt32;
};

// False where the type is none that Shoal reads (nested lists, structs, decimals, dates, views ...).
bool parse_type(const ArrowSchema& schema, ColumnType* type);

inline bool bit(const uint8_t* bits, int64_t i) { return (bits[i >> 3] >> (i & 7)) & 1; }

// Whether any of the bits [begin, end) is 0.
bool has_zero_bit(const uint8_t* bits, int64_t begin, int64_t end);

inline float half_to_float(uint16_t half) {
  // Exact: the exponent is scaled by multiplication, so that subnormal halves come out right; infinities and NaN keep
  // theirs.
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;
    std::memcpy(&value, &bits, 4);
  } else {
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
  }
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The elements of an array: values addressed by absolute index (the array's own offset included by the caller).
struct ElementView {
  Element element = Element::kNull;
  const uint8_t* validity = nullptr;  // nullptr: every element of the rows in use is valid.
  const void* values = nullptr;       // Numbers, bits, or the offsets of bytes.
  const char* bytes = nullptr;

  bool may_have_nulls() const { return validity != nullptr || element == Element::kNull; }
  bool is_valid(int64_t i) const { return element != Element::kNull && (validity == nullptr || bit(validity, i)); }
};

// A column of one chunk: rows of element ranges. A scalar column is rows of one element.
struct ColumnView {
  ColumnType type;
  int64_t num_rows = 0;
  int64_t first_row = 0;                  // Index of row 0 in the column's own buffers.
  const uint8_t* row_validity = nullptr;  // nullptr: no null row, unless rows_are_null.
  bool rows_are_null = false;             // A scalar column of Arrow's null type.
  const void* offsets = nullptr;          // kList (int32), kLargeList (int64).
  int64_t child_offset = 0;
  ElementView elements;    // With a dictionary: its keys.
  ElementView dictionary;  // The dictionary's values.
  int64_t dictionary_offset = 0;
  int64_t dictionary_length = 0;

  bool may_have_null_rows() const { return row_validity != nullptr || rows_are_null; }
  bool row_is_valid(int64_t row) const {
    return !rows_are_null && (row_validity == nullptr || bit(row_validity, first_row + row));
  }
  int64_t begin(int64_t row) const {
    switch (type.container) {
      case Container::kScalar:
        return first_row + row;
      case Container::kFixedList:
        return child_offset + (first_row + row) * type.list_size;
      case Container::kList:
        return child_offset + static_cast<const int32_t*>(offsets)[first_row + row];
      default:
        return child_offset + static_cast<const int64_t*>(offsets)[first_row + row];
    }
  }
  int64_t end(int64_t row) const { return begin(row + 1); }
};

// A view of child `array` of a batch, rows [start, start + num_rows) of it. Throws std::runtime_error where its offsets
// descend or leave its child array.
ColumnView view_column(const ColumnType& type, const ArrowArray& array, int64_t start, int64_t num_rows);

// One value as an id: integers keep their 64-bit pattern (unsigned ones too), bytes are hashed.
inline int64_t read_id(const ElementView& view, int64_t i) {
  switch (view.element) {
    case Element::kInt8: return static_cast<const int8_t*>(view.values)[i];
    case Element::kInt16: return static_cast<const int16_t*>(view.values)[i];
    case Element::kInt32: return static_cast<const int32_t*>(view.values)[i];
    case Element::kInt64: return static_cast<const int64_t*>(view.values)[i];
    case Element::kUint8: return static_cast<const uint8_t*>(view.values)[i];
    case Element::kUint16: return static_cast<const uint16_t*>(view.values)[i];
    case Element::kUint32: return static_cast<const uint32_t*>(view.values)[i];
    case Element::kUint64: return static_cast<int64_t>(static_cast<const uint64_t*>(view.values)[i]);
    case Element::kBool: return bit(static_cast<const uint8_t*>(view.values), i);
    case Element::kBytes32: {
      const int32_t* at = static_cast<const int32_t*>(view.values) + i;
      return static_cast<int64_t>(xxh64(view.bytes + at[0], static_cast<uint64_t>(at[1] - at[0])));
    }
    case Element::kBytes64: {
      const int64_t* at = static_cast<const int64_t*>(view.values) + i;
      return static_cast<int64_t>(xxh64(view.bytes + at[0], static_cast<uint64_t>(at[1] - at[0])));
    }
    default: return 0;
  }
}

// One value as a double; exact for everything but 64-bit integers beyond 2^53.
inline double read_number(const ElementView& view, int64_t i) {
  switch (view.element) {
    case Element::kFloat16: return half_to_float(static_cast<const uint16_t*>(view.values)[i]);
    case Element::kFloat32: return static_cast<const float*>(view.values)[i];
    case Element::kFloat64: return static_cast<const double*>(view.values)[i];
    case Element::kUint64: return static_cast<double>(static_cast<const uint64_t*>(view.values)[i]);
    default: return static_cast<double>(read_id(view, i));
  }
}

}  // namespace shoal
