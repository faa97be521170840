// wgmma m64 x N x k16: d += A * B (d = A * B where `accumulate` is 0), FP16 operands in shared memory, FP32 accumulators.
// A is K-major. TRANSPOSE_B = 0: B is stored N x K (K contiguous); 1: K x N (N contiguous, in blocks of 64).
#pragma once
#include "ptx.cuh"

template <int N>
struct Wgmma;

// Inline PTX wants every accumulator spelled out, as operand (D) and by operand number (R): in groups of eight.
#define WGMMA_D(i) \
  "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]), \
      "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define WGMMA_D4 WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3)
#define WGMMA_D6 WGMMA_D4, WGMMA_D(4), WGMMA_D(5)
#define WGMMA_D8 WGMMA_D6, WGMMA_D(6), WGMMA_D(7)
#define WGMMA_D9 WGMMA_D8, WGMMA_D(8)
#define WGMMA_D10 WGMMA_D9, WGMMA_D(9)
#define WGMMA_D11 WGMMA_D10, WGMMA_D(10)
#define WGMMA_D12 WGMMA_D11, WGMMA_D(11)
#define WGMMA_D16 WGMMA_D12, WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15)
#define WGMMA_R4 \
  "%0, %1, %2, %3, %4, %5, %6, %7" \
  ", %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R6 \
  WGMMA_R4 ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R8 \
  WGMMA_R6 ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R9 \
  WGMMA_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R10 \
  WGMMA_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R11 \
  WGMMA_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R12 \
  WGMMA_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R16 \
  WGMMA_R12 ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

// R, D: the N / 2 accumulators. A, B, P, T: the numbers of the operands after them.
#define WGMMA_ATOM(N, R, D, A, B, P, T)                                                             \
  template <>                                                                                       \
  struct Wgmma<N> {                                                                                 \
    template <int TRANSPOSE_B>                                                                      \
    static __device__ __forceinline__ void mma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P ", 0;\n"                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16"                         \
                   " {" R "}, %" #A ", %" #B ", p, 1, 1, 0, %" #T ";}"                              \
                   : D                                                                              \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));                            \
    }                                                                                               \
  };
WGMMA_ATOM(64, WGMMA_R4, WGMMA_D4, 32, 33, 34, 35)
WGMMA_ATOM(96, WGMMA_R6, WGMMA_D6, 48, 49, 50, 51)
WGMMA_ATOM(128, WGMMA_R8, WGMMA_D8, 64, 65, 66, 67)
WGMMA_ATOM(144, WGMMA_R9, WGMMA_D9, 72, 73, 74, 75)
WGMMA_ATOM(160, WGMMA_R10, WGMMA_D10, 80, 81, 82, 83)
WGMMA_ATOM(176, WGMMA_R11, WGMMA_D11, 88, 89, 90, 91)
WGMMA_ATOM(192, WGMMA_R12, WGMMA_D12, 96, 97, 98, 99)
WGMMA_ATOM(256, WGMMA_R16, WGMMA_D16, 128, 129, 130, 131)
