// Random number generators of the device: their state is in the worker.
#pragma once

#include <ATen/core/Generator.h>

namespace sing::client {

// The device's default generator, number 0.
const at::Generator& default_generator();
// How often it was given a seed or a state.
uint64_t default_seedings();
at::Generator new_generator(c10::DeviceIndex label);
// Tells a session that was just opened the seed that was set before; see Note [Opening] in
// session.h.
void tell_default_generator();
uint32_t generator_number(const at::Generator& generator);

// Save and restore the state of the device's default generator.
void keep_default_generator();
void put_back_default_generator();

}  // namespace sing::client
