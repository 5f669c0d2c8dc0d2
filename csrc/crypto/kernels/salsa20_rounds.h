// The rounds of Salsa20 on words of any width: one number, or a register with that word of several
// blocks. Pure.
//
// A file defines INLINE before it includes this. INLINE names the instructions that the file is
// compiled for: compilers inline such functions only into functions with the same instructions.
// Lanes has the type Word, and the functions plus(a, b) and xor_rotated<bits>(word, sum), which
// gives word XOR (sum rotated to the left).
#pragma once

namespace tensorizer::crypto {
namespace {

template <class Lanes, class Word = typename Lanes::Word>
INLINE void quarter_round(Word& a, Word& b, Word& c, Word& d) {
  b = Lanes::template xor_rotated<7>(b, Lanes::plus(a, d));
  c = Lanes::template xor_rotated<9>(c, Lanes::plus(b, a));
  d = Lanes::template xor_rotated<13>(d, Lanes::plus(c, b));
  a = Lanes::template xor_rotated<18>(a, Lanes::plus(d, c));
}

template <class Lanes>
INLINE void run_rounds(typename Lanes::Word* x) {
  for (int i = 0; i < 10; ++i) {
    quarter_round<Lanes>(x[0], x[4], x[8], x[12]);
    quarter_round<Lanes>(x[5], x[9], x[13], x[1]);
    quarter_round<Lanes>(x[10], x[14], x[2], x[6]);
    quarter_round<Lanes>(x[15], x[3], x[7], x[11]);
    quarter_round<Lanes>(x[0], x[1], x[2], x[3]);
    quarter_round<Lanes>(x[5], x[6], x[7], x[4]);
    quarter_round<Lanes>(x[10], x[11], x[8], x[9]);
    quarter_round<Lanes>(x[15], x[12], x[13], x[14]);
  }
}

// The keystream's words: those of the block before the rounds are added to those after them.
template <class Lanes>
INLINE void make_stream(typename Lanes::Word* x) {
  typename Lanes::Word start[16];
  for (int i = 0; i < 16; ++i) start[i] = x[i];
  run_rounds<Lanes>(x);
  for (int i = 0; i < 16; ++i) x[i] = Lanes::plus(x[i], start[i]);
}

}  // namespace
}  // namespace tensorizer::crypto
