/// Launches of graphs: those that hold what others have to agree to are agreed on.
#include "runtime/gate/agreed_graphs.hpp"

using namespace sluice::gate;

namespace {

CUresult launch(symbol which, CUgraphExec executable, stream_use where) {
  planned_work const work{
      where,
      the_gate().bounded() ? key_of_work({work_part(which), work_part(executable)}) : 0,
      {which, nullptr, 0}};
  gated_call const call{which, work, true};
  if (std::optional<CUresult> const agreed = launch_agreed(call, executable)) {
    return *agreed;
  }
  auto const submit = [=] {
    return real<CUresult (*)(CUgraphExec, CUstream)>(which)(executable, where.handle);
  };
  return dispatch_or_defer(call, any_kind, submit,
                           [&](submission_queue& queue, thread_slot const& self) {
                             return queue.push(self, work, any_kind, submit);
                           });
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  return launch(symbol::of_cuGraphLaunch, executable, {stream, false});
}
SLUICE_DRIVER_CALL CUresult cuGraphLaunch_ptsz(CUgraphExec executable, CUstream stream) {
  return launch(symbol::of_cuGraphLaunch_ptsz, executable, {stream, true});
}
