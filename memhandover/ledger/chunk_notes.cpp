#include "memhandover/ledger/chunk_notes.hpp"

#include <algorithm>

#include "memhandover/base/shared_text.hpp"

namespace sluice::memhandover {
chunk_notes::chunk_notes(ledger_view const& view, std::uint32_t slot) : view_(view), slot_(slot) {
  for (auto& note : view_.chunk_notes(slot_)) {
    note.store(0, std::memory_order_release);
  }
}

void chunk_notes::say(std::span<std::uint32_t const> chunks, std::string_view what) {
  auto const texts = view_.note_texts(slot_);
  what = cut_text(what, sizeof(note_text::text) - 1);
  std::uint16_t number = 0;
  while (number < texts_ && text_of(texts[number].text) != what) {
    ++number;
  }
  if (number == texts_ && number < texts.size()) {
    auto& text = texts[number].text;
    *std::copy(what.begin(), what.end(), text) = '\0';
    ++texts_;
  }
  // 0 says nothing, and a text is whole before a number names it.
  auto const note = static_cast<std::uint16_t>(number < texts_ ? number + 1 : 0);
  auto const notes = view_.chunk_notes(slot_);
  for (auto const chunk : chunks) {
    if (chunk < notes.size()) {
      notes[chunk].store(note, std::memory_order_release);
    }
  }
}

std::string chunk_note(ledger_view const& view, std::uint32_t slot, std::uint32_t chunk) {
  auto const note = view.chunk_notes(slot)[chunk].load(std::memory_order_acquire);
  auto const texts = view.note_texts(slot);
  return note == 0 || note > texts.size() ? std::string{}
                                          : std::string{text_of(texts[note - 1].text)};
}

}  // namespace sluice::memhandover
