#include "cgroup.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_MOUNTS 64

struct mount {
    char *root;
    char *point;
    char *options; /* of the superblock: the controllers in version 1 */
    bool unified;
};

/* Mountinfo writes blank, tab, newline and backslash as \ooo. */
static void unescape(char *text)
{
    char *out = text;

    for (; *text != '\0'; text++) {
        if (text[0] == '\\' && text[1] >= '0' && text[1] <= '3' && text[2] >= '0' && text[2] <= '7' && text[3] >= '0' &&
            text[3] <= '7') {
            *out++ = (char)((text[1] - '0') * 64 + (text[2] - '0') * 8 + (text[3] - '0'));
            text += 3;
        } else {
            *out++ = *text;
        }
    }
    *out = '\0';
}

/* "36 35 98:0 /root /point rw,noatime master:1 - cgroup cgroup rw,cpu,cpuacct" */
static bool read_mount(char *line, struct mount *mount)
{
    char *tail = strstr(line, " - ");
    char *rest = line;
    const char *type;

    if (tail == NULL)
        return false;
    *tail = '\0';
    tail += 3;
    for (int skipped = 0; skipped < 3; skipped++)
        strsep(&rest, " ");
    mount->root = strsep(&rest, " ");
    mount->point = strsep(&rest, " ");
    type = strsep(&tail, " ");
    strsep(&tail, " ");
    mount->options = tail;
    if (mount->root == NULL || mount->point == NULL || type == NULL || mount->options == NULL)
        return false;
    mount->unified = strcmp(type, "cgroup2") == 0;
    unescape(mount->root);
    unescape(mount->point);
    return mount->unified || strcmp(type, "cgroup") == 0;
}

static bool has_word(const char *list, const char *word, size_t length)
{
    while (*list != '\0') {
        size_t here = strcspn(list, ",");

        if (here == length && strncmp(list, word, length) == 0)
            return true;
        list += here;
        list += *list == ',';
    }
    return false;
}

static bool has_controllers(const struct mount *mount, const char *controllers)
{
    if (*controllers == '\0')
        return mount->unified;
    if (mount->unified)
        return false;
    while (*controllers != '\0') {
        size_t length = strcspn(controllers, ",");

        if (!has_word(mount->options, controllers, length))
            return false;
        controllers += length;
        controllers += *controllers == ',';
    }
    return true;
}

/* Returns the part of PATH below the mount's root; NULL: not part of this mount. */
static const char *below(const struct mount *mount, const char *path)
{
    size_t length = strlen(mount->root);

    if (strcmp(mount->root, "/") == 0)
        return path;
    if (strncmp(path, mount->root, length) == 0 && (path[length] == '/' || path[length] == '\0'))
        return path + length;
    return NULL;
}

bool cgroup_each_procs(char *cgroups, char *mounts, cgroup_each *each, void *context)
{
    struct mount found[MOST_MOUNTS];
    char procs[PATH_MAX];
    int count = 0;
    int placed = 0;
    char *line;

    while ((line = strsep(&mounts, "\n")) != NULL && count < MOST_MOUNTS)
        if (read_mount(line, &found[count]))
            count++;
    while ((line = strsep(&cgroups, "\n")) != NULL) {
        char *path = line;
        const char *controllers;

        strsep(&path, ":");
        controllers = strsep(&path, ":");
        if (path == NULL || controllers == NULL)
            continue;
        for (int i = 0; i < count; i++) {
            const char *inside;

            if (!has_controllers(&found[i], controllers) || (inside = below(&found[i], path)) == NULL)
                continue;
            if (snprintf(procs, sizeof(procs), "%s%s/cgroup.procs", found[i].point, strcmp(inside, "/") == 0 ? "" : inside) >=
                (int)sizeof(procs))
                continue;
            if (!each(procs, context))
                return false;
            placed++;
            break;
        }
    }
    return placed > 0;
}
