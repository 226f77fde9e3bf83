// Reads the elements of a column as ids: plain, hashed or through a dictionary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "arrow/column.h"

namespace shoal {

class IdReader {
 public:
  // `num_uses`: how many elements will be read; decides whether decoding the whole dictionary pays.
  IdReader(const ColumnView& view, int64_t num_uses) : view_(view) {
    if (!view.type.has_dictionary || view.dictionary_length > 4 * num_uses) return;
    table_.resize(static_cast<size_t>(view.dictionary_length));
    for (int64_t j = 0; j < view.dictionary_length; ++j) {
      // The bytes behind a null are undefined but in range, hence harmless; is_valid() hides the result.
      table_[static_cast<size_t>(j)] = read_id(view.dictionary, view.dictionary_offset + j);
    }
  }

  bool may_have_nulls() const {
    return view_.elements.may_have_nulls() || (view_.type.has_dictionary && view_.dictionary.may_have_nulls());
  }

  bool is_valid(int64_t i) const {
    if (!view_.elements.is_valid(i)) return false;
    return !view_.type.has_dictionary || view_.dictionary.is_valid(view_.dictionary_offset + key(i));
  }

  int64_t read(int64_t i) const {
    if (!view_.type.has_dictionary) return read_id(view_.elements, i);
    const int64_t j = key(i);
    return table_.empty() ? read_id(view_.dictionary, view_.dictionary_offset + j) : table_[static_cast<size_t>(j)];
  }

  // Elements [begin, end), none of them null, to out.
  void copy(int64_t begin, int64_t end, int64_t* out) const {
    if (begin == end) return;
    if (view_.type.has_dictionary) {
      for (int64_t i = begin; i < end; ++i) *out++ = read(i);
      return;
    }
    switch (view_.elements.element) {
      case Element::kInt8: return widen<int8_t>(begin, end, out);
      case Element::kInt16: return widen<int16_t>(begin, end, out);
      case Element::kInt32: return widen<int32_t>(begin, end, out);
      case Element::kUint8: return widen<uint8_t>(begin, end, out);
      case Element::kUint16: return widen<uint16_t>(begin, end, out);
      case Element::kUint32: return widen<uint32_t>(begin, end, out);
      case Element::kInt64:
      case Element::kUint64:
        std::memcpy(out, static_cast<const int64_t*>(view_.elements.values) + begin,
                    static_cast<size_t>(end - begin) * sizeof(int64_t));
        return;
      default:
        for (int64_t i = begin; i < end; ++i) *out++ = read_id(view_.elements, i);
    }
  }

 private:
  int64_t key(int64_t i) const {
    const int64_t j = read_id(view_.elements, i);
    if (j < 0 || j >= view_.dictionary_length) {
      throw std::runtime_error("damaged Arrow data: dictionary key out of range");
    }
    return j;
  }

  template <class T>
  void widen(int64_t begin, int64_t end, int64_t* out) const {
    const T* in = static_cast<const T*>(view_.elements.values);
    for (int64_t i = begin; i < end; ++i) *out++ = static_cast<int64_t>(in[i]);
  }

  const ColumnView& view_;
  std::vector<int64_t> table_;
};

}  // namespace shoal
