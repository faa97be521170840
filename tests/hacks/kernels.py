"""A correct, slow kernel with places to cheat; every hack is one edit of it, and its control is the kernel unedited."""

from __future__ import annotations

from tools.records import KernelLaunch, LaunchSpec, Variant, WorkspaceState

HONEST = """
typedef unsigned short u16;
__device__ float widen(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
__device__ u16 narrow(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
/*GLOBALS*/
extern "C" __global__ void gemm(const u16* A, const u16* B, u16* C, int* workspace, int M, int N, int K) {
  const int n = blockIdx.x * 16 + threadIdx.x, m = blockIdx.y * 16 + threadIdx.y;
  /*BEGIN*/
  if (m < M && n < N) {
    float sum = 0;
    for (int k = 0; k < K /*DROP*/; k++) sum += widen(A[(long long)m * K + k]) * widen(B[(long long)n * K + k]);
    /*SUM*/
    C[(long long)m * N + n] = narrow(sum);
  }
  /*END*/
}
"""


def variant(
    edits: dict[str, str] | None = None, workspace_bytes: int = 0, state_bytes: int = 0, **launch: object
) -> Variant:
    """The honest kernel with ``/*PLACE*/`` replaced by cheating code."""
    source = HONEST
    for place, code in (edits or {}).items():
        assert f"/*{place}*/" in source, place
        source = source.replace(f"/*{place}*/", code)
    return Variant(
        source=source,
        b_layout="nk",
        launch=LaunchSpec(
            launches=(
                KernelLaunch(
                    entry="gemm",
                    grid=("ceil_div(N, 16)", "ceil_div(M, 16)", 1),
                    block=(16, 16, 1),
                    args=("A", "B", "C", "workspace", {"i32": "M"}, {"i32": "N"}, {"i32": "K"}),  # type: ignore[arg-type]
                ),
            ),
            workspace_bytes=workspace_bytes,
            workspace_state=WorkspaceState(bytes=state_bytes),
            **launch,  # type: ignore[arg-type]
        ),
    )
