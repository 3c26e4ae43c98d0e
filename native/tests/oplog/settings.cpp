// Torch's settings: from the notebook's torch to the worker's, and through snapshots.
#include "oplog/settings.h"

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

// Settings of this process, which is both client and worker here; restored at the end.
class Kept {
 public:
  Kept() { read_settings(before_); }
  ~Kept() { apply_settings(before_); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  const Settings& before() const { return before_; }

 private:
  Settings before_{};
};

Settings present() {
  Settings values{};
  read_settings(values);
  return values;
}

Settings with(Settings values, at::ScalarType dtype, uint8_t determinism) {
  values[0] = static_cast<uint8_t>(dtype);
  values[1] = determinism;
  return values;
}

void send(Host& host, const Settings& values) {
  Writer out;
  put_settings(out, values);
  host.append(RecordKind::settings, 0, out);
}

}  // namespace

TEST(every_setting_can_be_read_and_put_back) {
  const Kept kept;
  at::Context& torch = at::globalContext();
  torch.setDeterministicAlgorithms(true, true);
  torch.setFloat32MatmulPrecision("medium");
  torch.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV,
                            at::Float32Precision::IEEE);
  torch.setAllowFP16ReductionCuBLAS(false, false);
  torch.setSDPUseFlash(false);
  torch.setSDPPriorityOrder({4, 3, 2, 1, 0});
  torch.setUserEnabledMkldnn(false);
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(at::kDouble));
  const Settings changed = present();
  apply_settings(kept.before());
  EXPECT(present() == kept.before());
  EXPECT(!torch.deterministicAlgorithms());
  EXPECT(torch.userEnabledFlashSDP());
  apply_settings(changed);
  EXPECT(present() == changed);
  EXPECT(torch.deterministicAlgorithmsWarnOnly());
  EXPECT(torch.float32MatmulPrecision() == at::Float32MatmulPrecision::MEDIUM);
  EXPECT(torch.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV) ==
         at::Float32Precision::IEEE);
  EXPECT(torch.sDPPriorityOrder()[0] == at::SDPBackend::overrideable);
  EXPECT(!torch.userEnabledMkldnn());
}

TEST(what_the_old_settings_cannot_tell_stays_what_it_was) {
  const Kept kept;
  at::globalContext().setFloat32MatmulPrecision("highest");
  Settings values = present();
  const uint8_t told = values[3];
  at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL,
                                          at::Float32Precision::TF32);
  read_settings(values);
  EXPECT_EQ(values[3], told);
}

TEST(settings_hold_from_their_record_on_and_survive_a_snapshot) {
  const Kept kept;
  Host host;
  host.start();
  const auto ones = host.allocate({2}, at::kLong);
  const auto divide = host.define("aten::div", "Tensor");
  const auto quotient = [&](at::ScalarType dtype) {
    const Tensor result{host.next_id(), {2}, dtype};
    host.call(CallRecord(divide, 2, 1).tensor(ones).tensor(ones).returns(result));
    return host.synchronize().ok();
  };
  EXPECT(quotient(at::kFloat));
  const Settings doubles = with(kept.before(), at::kDouble, 3);
  send(host, doubles);
  EXPECT(quotient(at::kDouble));
  EXPECT(at::globalContext().deterministicAlgorithms());
  const File tables(host.snapshot());
  host.stop();
  apply_settings(kept.before());
  host.start(tables.fd());
  EXPECT(quotient(at::kDouble));
  EXPECT(present() == doubles);
}

TEST(settings_that_no_torch_has_are_a_corrupt_log) {
  const Kept kept;
  for (const auto& spoil :
       {+[](Writer& out) { out.patch<uint32_t>(0, 3); },
        +[](Writer& out) { out.patch<uint8_t>(4, 255); },
        +[](Writer& out) { out.patch<uint8_t>(4, static_cast<uint8_t>(at::kLong)); },
        +[](Writer& out) { out.patch<uint8_t>(5, 4); }}) {
    Host host;
    host.start();
    Writer out;
    put_settings(out, kept.before());
    spoil(out);
    host.append(RecordKind::settings, 0, out);
    EXPECT(!host.corruption().empty());
    EXPECT(present() == kept.before());
  }
}
