/* SimGrid's side of `polder bench fabric`, which compiles it. Reads hosts, links and flows with their routes from a file; prints the
   seconds that the simulation took, without reading the file and without building the platform, then when each flow ends. */
#include <chrono>
#include <cstdio>
#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

namespace sg4 = simgrid::s4u;

struct Flow {
    int from, to;
    double bytes;
};

int main(int argc, char** argv) {
    sg4::Engine engine(&argc, argv);
    FILE* in = std::fopen(argv[1], "r");
    int hosts, links, flows;
    if (!in || std::fscanf(in, "%d %d %d", &hosts, &links, &flows) != 3) return 2;
    auto* zone = sg4::create_full_zone("zone");
    std::vector<sg4::Host*> host(hosts);
    std::vector<sg4::Link*> link(links);
    for (int i = 0; i < hosts; i++) host[i] = zone->create_host("h" + std::to_string(i), 1e9);
    for (int i = 0; i < links; i++) {
        double bandwidth, latency;
        if (std::fscanf(in, "%lf %lf", &bandwidth, &latency) != 2) return 2;
        link[i] = zone->create_link("l" + std::to_string(i), bandwidth)->set_latency(latency)->seal();
    }
    std::vector<Flow> flow(flows);
    for (auto& it : flow) {
        int count, index;
        if (std::fscanf(in, "%d %d %lf %d", &it.from, &it.to, &it.bytes, &count) != 4) return 2;
        std::vector<sg4::LinkInRoute> route;
        for (int i = 0; i < count; i++) {
            if (std::fscanf(in, "%d", &index) != 1) return 2;
            route.emplace_back(link[index]);
        }
        zone->add_route(host[it.from]->get_netpoint(), host[it.to]->get_netpoint(), nullptr, nullptr, route, false);
    }
    std::fclose(in);
    zone->seal();
    std::vector<double> end(flows);
    /* One actor starts all: an actor for each flow would take longer. */
    sg4::Actor::create("all", host[0], [&] {
        std::vector<sg4::CommPtr> comms;
        for (const auto& it : flow) comms.push_back(sg4::Comm::sendto_async(host[it.from], host[it.to], it.bytes));
        for (int i = 0; i < flows; i++) {
            comms[i]->wait();
            end[i] = comms[i]->get_finish_time();
        }
    });
    const auto begin = std::chrono::steady_clock::now();
    engine.run();
    std::printf("%.9f\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    for (double it : end) std::printf("%.17g\n", it);
}
