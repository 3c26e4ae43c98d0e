#include "sandbox/messages.h"

#include <sys/socket.h>

#include <algorithm>

namespace sing::sandbox {
namespace {

constexpr size_t kTextMax = 1024;

}  // namespace

bool send_event(int socket, Event event, std::string_view text, int fd) {
  std::string bytes(1, static_cast<char>(event));
  bytes += text.substr(0, kTextMax - 1);
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return retried([&] { return sendmsg(socket, &message, MSG_NOSIGNAL); }) >= 0;
}

Received receive_event(int socket) {
  char bytes[kTextMax];
  iovec part{bytes, sizeof bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t count = retried([&] { return recvmsg(socket, &message, MSG_CMSG_CLOEXEC); });
  Received received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); count > 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    received.fd.reset(fd);
  }
  if (count <= 0) return received;
  received.event = static_cast<Event>(bytes[0]);
  received.text.assign(bytes + 1, static_cast<size_t>(count - 1));
  return received;
}

}  // namespace sing::sandbox
