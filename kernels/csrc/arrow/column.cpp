#include "arrow/column.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace shoal {

namespace {

// The element types of one-letter formats.
bool parse_element(const char* format, Element* element) {
  if (format[0] == '\0' || format[1] != '\0') return false;
  switch (format[0]) {
    case 'c': *element = Element::kInt8; return true;
    case 's': *element = Element::kInt16; return true;
    case 'i': *element = Element::kInt32; return true;
    case 'l': *element = Element::kInt64; return true;
    case 'C': *element = Element::kUint8; return true;
    case 'S': *element = Element::kUint16; return true;
    case 'I': *element = Element::kUint32; return true;
    case 'L': *element = Element::kUint64; return true;
    case 'b': *element = Element::kBool; return true;
    case 'e': *element = Element::kFloat16; return true;
    case 'f': *element = Element::kFloat32; return true;
    case 'g': *element = Element::kFloat64; return true;
    case 'u': case 'z': *element = Element::kBytes32; return true;
    case 'U': case 'Z': *element = Element::kBytes64; return true;
    case 'n': *element = Element::kNull; return true;
    default: return false;
  }
}

bool parse_values(const ArrowSchema& schema, ColumnType* type) {
  if (schema.dictionary != nullptr) {
    type->has_dictionary = true;
    return parse_element(schema.format, &type->index) && is_integer(type->index) &&
           schema.dictionary->dictionary == nullptr && parse_element(schema.dictionary->format, &type->element);
  }
  return parse_element(schema.format, &type->element);
}

ElementView view_elements(Element element, const ArrowArray& array, int64_t begin, int64_t end) {
  ElementView view;
  view.element = element;
  if (element == Element::kNull) return view;
  const auto* bits = static_cast<const uint8_t*>(array.buffers[0]);
  if (bits != nullptr && array.null_count != 0 && has_zero_bit(bits, begin, end)) view.validity = bits;
  view.values = array.buffers[1];
  if (is_bytes(element)) view.bytes = static_cast<const char*>(array.buffers[2]);
  return view;
}

template <class Offset>
bool offsets_are_sound(const Offset* offsets, int64_t num_rows, int64_t length) {
  bool descends = offsets[0] < 0;
  for (int64_t row = 0; row < num_rows; ++row) descends |= offsets[row + 1] < offsets[row];
  return !descends && offsets[num_rows] <= length;
}

bool ranges_are_sound(const ColumnView& view, const ArrowArray& elements) {
  switch (view.type.container) {
    case Container::kScalar:
      return true;
    case Container::kFixedList:
      return (view.first_row + view.num_rows) * view.type.list_size <= elements.length;
    case Container::kList:
      return offsets_are_sound(static_cast<const int32_t*>(view.offsets) + view.first_row, view.num_rows,
                               elements.length);
    default:
      return offsets_are_sound(static_cast<const int64_t*>(view.offsets) + view.first_row, view.num_rows,
                               elements.length);
  }
}

}  // namespace

bool parse_type(const ArrowSchema& schema, ColumnType* type) {
  const char* format = schema.format;
  if (format[0] != '+') return parse_values(schema, type);
  if (std::strcmp(format, "+l") == 0) {
    type->container = Container::kList;
  } else if (std::strcmp(format, "+L") == 0) {
    type->container = Container::kLargeList;
  } else if (std::strncmp(format, "+w:", 3) == 0) {
    type->container = Container::kFixedList;
    type->list_size = std::atoll(format + 3);
  } else {
    return false;
  }
  return schema.n_children == 1 && parse_values(*schema.children[0], type);
}

bool has_zero_bit(const uint8_t* bits, int64_t begin, int64_t end) {
  for (; begin < end && (begin & 7) != 0; ++begin) {
    if (!bit(bits, begin)) return true;
  }
  for (; begin + 64 <= end; begin += 64) {
    uint64_t word;
    std::memcpy(&word, bits + (begin >> 3), 8);
    if (word != ~uint64_t{0}) return true;
  }
  for (; begin < end; ++begin) {
    if (!bit(bits, begin)) return true;
  }
  return false;
}

ColumnView view_column(const ColumnType& type, const ArrowArray& array, int64_t start, int64_t num_rows) {
  ColumnView view;
  view.type = type;
  view.num_rows = num_rows;
  view.first_row = array.offset + start;
  const ArrowArray* elements = &array;
  if (type.container != Container::kScalar) {
    const auto* bits = static_cast<const uint8_t*>(array.buffers[0]);
    if (bits != nullptr && array.null_count != 0 && has_zero_bit(bits, view.first_row, view.first_row + num_rows)) {
      view.row_validity = bits;
    }
    if (type.container != Container::kFixedList) view.offsets = array.buffers[1];
    elements = array.children[0];
    view.child_offset = elements->offset;
  }
  // An array of length 0 may have no offsets at all.
  if (num_rows == 0) return view;
  if (!ranges_are_sound(view, *elements)) throw std::runtime_error("damaged Arrow data: list offsets out of range");
  const int64_t begin = view.begin(0), end = view.end(num_rows - 1);
  view.elements = view_elements(type.has_dictionary ? type.index : type.element, *elements, begin, end);
  if (type.has_dictionary) {
    const ArrowArray& values = *elements->dictionary;
    view.dictionary_offset = values.offset;
    view.dictionary_length = values.length;
    view.dictionary = view_elements(type.element, values, values.offset, values.offset + values.length);
  }
  if (type.container == Container::kScalar) {
    view.row_validity = view.elements.validity;
    view.elements.validity = nullptr;
    view.rows_are_null = view.elements.element == Element::kNull;
  }
  return view;
}

}  // namespace shoal
